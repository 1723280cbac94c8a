"""Turns a recipe into the arguments of ``python -m bebop.run`` that start it on a Ray cluster."""

from recipes.cluster.recipe import Recipe

VERL = "runtime=verl"


def arguments(recipe: Recipe) -> list[str]:
    """Return the arguments of ``bebop.run``; the user's own arguments follow them."""
    if recipe.file.trainer == "own":
        return [*recipe.file.job, "runtime.address=auto"]
    return [VERL, f"bebop={recipe.file.group}", *verl_overrides(recipe)]


def verl_overrides(recipe: Recipe) -> list[str]:
    """Return the sizes of a recipe under verl's names: trainer and engines apart, weights sent after every update."""
    job, each = recipe.job, recipe.roofline.gpu.per_machine
    rollout, trainer, sampling = job.rollout, job.trainer, job.rollout.sampling
    engines = rollout.workers * rollout.sglang.tensor_parallel
    actor, ours = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    drafts, split = job.decoding.limit, recipe.file.sequence_parallel
    return [
        f"data.train_batch_size={trainer.groups_per_step}",
        f"data.max_prompt_length={recipe.file.prompt_tokens}",
        f"data.max_response_length={sampling.max_new_tokens}",
        f"{actor}.ppo_mini_batch_size={trainer.groups_per_step}",
        f"{actor}.ppo_max_token_len_per_gpu={-(-rollout.max_length // split)}",
        f"{actor}.fsdp_config.ulysses_sequence_parallel_size={split}",
        f"{actor}.fsdp_config.param_offload=false",
        f"{actor}.fsdp_config.optimizer_offload=false",
        f"{actor}.optim.lr={trainer.lr}",
        f"{ours}.n={trainer.group_size}",
        f"{ours}.nnodes={max(1, engines // each)}",
        f"{ours}.n_gpus_per_node={min(each, engines)}",
        f"{ours}.tensor_model_parallel_size={rollout.sglang.tensor_parallel}",
        f"{ours}.max_model_len={rollout.max_length}",
        f"{ours}.engine_kwargs.sglang.max_running_requests={rollout.slots}",
        f"{ours}.checkpoint_engine.backend=nccl",
        f"actor_rollout_ref.model.mtp.speculative_num_steps={drafts}",
        f"actor_rollout_ref.model.mtp.speculative_num_draft_tokens={drafts + 1}",
        "actor_rollout_ref.hybrid_engine=false",
        f"trainer.nnodes={max(1, trainer.ranks // each)}",
        f"trainer.n_gpus_per_node={min(each, trainer.ranks)}",
        f"trainer.total_training_steps={trainer.steps}",
        "trainer.v1.trainer_mode=separate_async",
        f"trainer.v1.separate_async.num_warmup_batches={rollout.staleness}",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "+ray_kwargs.ray_init.address=auto",
    ]
