"""What is refused before anything starts, and that the driver says so in one line."""

from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from bebop.errors import UserError
from bebop.model.checkpoint import resolve
from bebop.verl_job import driver, megatron_engine
from bebop.verl_job.driver import EVERY, check_job, hand_over, with_rollout
from bebop.verl_job.selftest import verdict
from bebop.verl_job.settings import EXTERNAL, SELECTOR, VARIABLE, VerlConfig, current, parse

JOB = f"""
trainer: {{n_gpus_per_node: 4, nnodes: 1}}
data: {{train_batch_size: 16}}
actor_rollout_ref:
  actor: {{strategy: fsdp2, use_dynamic_bsz: false, fsdp_config: {{ulysses_sequence_parallel_size: 1}}}}
  model:
    path: {resolve("tiny")}
    lora_rank: 0
    mtp: {{enable: true, enable_rollout: true, enable_train: false, speculative_eagle_topk: 1, speculative_num_steps: 3,
           speculative_num_draft_tokens: 4, method: mtp, num_speculative_tokens: 3}}
  rollout:
    name: sglang
    n: 8
    nnodes: 0
    load_format: auto
    logprobs_mode: processed_logprobs
    tensor_model_parallel_size: 2
    data_parallel_size: 1
    pipeline_model_parallel_size: 1
    checkpoint_engine: {{backend: naive}}
    engine_kwargs: {{sglang: {{speculative_use_rejection_sampling: true}}, vllm: {{async_scheduling: null}}}}
"""
ROLLOUT, MODEL, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.model", "actor_rollout_ref.actor"
VLLM = {f"{ROLLOUT}.name": "vllm"}
EMBEDDED = {"trainer.n_gpus_per_node": 1, f"{ROLLOUT}.name": "bebop", f"{ROLLOUT}.tensor_model_parallel_size": 1}


def job(changes: dict[str, Any] | None = None) -> DictConfig:
    config = OmegaConf.create(JOB)
    for name, value in (changes or {}).items():
        OmegaConf.update(config, name, value)
    return config


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "version", lambda name: {"sglang": "0.5.23", "vllm": "0.31.0"}[name])


@pytest.mark.parametrize("changes", [{}, EMBEDDED, VLLM])
def test_what_goes_together_passes(changes: dict[str, Any]) -> None:
    check_job(job(changes), VerlConfig(metrics=True, train_head=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{ROLLOUT}.tensor_model_parallel_size": 3}, "tensor_model_parallel_size=3 .* multiple of the 3"),
        ({"data.train_batch_size": 17, f"{ROLLOUT}.n": 1}, "train_batch_size=17 .* multiple of 4 devices"),
        ({f"{MODEL}.mtp.enable_rollout": False}, "it takes model.mtp.enable=true"),
        ({f"{MODEL}.mtp.speculative_eagle_topk": 4}, "speculative_eagle_topk=4 .* give 1"),
        ({f"{MODEL}.mtp.speculative_num_draft_tokens": 8}, "speculative_num_draft_tokens=8 .* give 4"),
        (
            {**EMBEDDED, "trainer.n_gpus_per_node": 4, f"{ROLLOUT}.data_parallel_size": 2},
            "data_parallel_size=2 is not possible with rollout.name=bebop",
        ),
        (
            {**EMBEDDED, f"{ROLLOUT}.engine_kwargs.bebop.system": "warp"},
            "engine_kwargs.bebop.system='warp' is not possible",
        ),
        ({**EMBEDDED, f"{ROLLOUT}.engine_kwargs.bebop.draft_tokens": 99}, "decoding.draft_tokens=99"),
        ({f"{ACTOR}.fsdp_config.offload_policy": True}, "train_head=True .* use param_offload"),
        ({f"{ACTOR}.strategy": "fsdp"}, "strategy='fsdp' does not have it; choose fsdp2 or megatron"),
        ({f"{ACTOR}.strategy": "megatron"}, "needs model.mtp.enable=true and model.mtp.enable_train=true"),
        ({f"{ROLLOUT}.checkpoint_engine.backend": "delta_sharded"}, "sends differences, no head"),
        ({f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2}, "train_head=True .* split 2 ways"),
        ({f"{MODEL}.lora_rank": 8}, "train_head=True .* LoRA"),
        ({**EMBEDDED, f"{MODEL}.lora_rank": 8}, "model.lora_rank=8 is not possible: rollout.name=bebop takes whole"),
        ({**EMBEDDED, f"{ROLLOUT}.engine_kwargs.bebop.system": "autoregressive"}, "the rollout engine drafts nothing"),
        ({**VLLM, f"{MODEL}.mtp.enable": False}, "the rollout engine uses no head"),
        ({**VLLM, f"{MODEL}.mtp.method": "eagle"}, "mtp.method='eagle' .* give mtp"),
        ({**VLLM, f"{ROLLOUT}.logprobs_mode": "raw_logprobs"}, "'raw_logprobs' .* give processed_logprobs"),
        (
            {**VLLM, f"{ROLLOUT}.engine_kwargs.vllm.async_scheduling": True},
            "async_scheduling=True .* give false or null",
        ),
        ({**VLLM, f"{ROLLOUT}.engine_kwargs.vllm": None}, "async_scheduling=None .* give false or null"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")  # where vLLM's first model runner is taken
    with pytest.raises(UserError, match=message) as caught:
        check_job(job(changes), VerlConfig(metrics=True, train_head=True))
    assert "\n" not in str(caught.value)


def test_embedded_engines_would_all_decode_on_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    several = job({**EMBEDDED, "trainer.n_gpus_per_node": 2})
    with pytest.raises(UserError, match="not possible with 2 GPUs: give one"):
        check_job(several, VerlConfig())
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    check_job(several, VerlConfig())


def test_an_sglang_without_rejection_sampling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "version", lambda name: "0.5.12")
    with pytest.raises(UserError, match=r"SGLang 0.5.12 lacks rejection sampling; install 0.5.14 or newer"):
        check_job(job(), VerlConfig())
    check_job(job({f"{ROLLOUT}.engine_kwargs.sglang.speculative_use_rejection_sampling": False}), VerlConfig())


@pytest.mark.parametrize("engine", [{}, VLLM])
def test_a_draft_that_nobody_gives_weights_is_refused(engine: dict[str, Any]) -> None:
    dummy = job({**engine, f"{ROLLOUT}.load_format": "dummy"})
    with pytest.raises(UserError, match=r"load_format='dummy' .* stay as it was made, at random; give auto"):
        check_job(dummy, VerlConfig())
    check_job(dummy, VerlConfig(train_head=True))
    packed = job({**engine, f"{ROLLOUT}.quantization": "fp8"})
    with pytest.raises(UserError, match=r"quantization='fp8' .* would have no scales; give null, or bebop.train_head"):
        check_job(packed, VerlConfig())
    check_job(packed, VerlConfig(train_head=True))


def test_a_vllm_that_is_too_old_or_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "version", lambda name: "0.30.2")
    with pytest.raises(UserError, match=r"vLLM 0\.30\.2 takes no new weights for drafts; install 0\.31 or newer"):
        check_job(job(VLLM), VerlConfig())
    check_job(job({**VLLM, f"{MODEL}.mtp.enable_rollout": False}), VerlConfig())

    def missing(name: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(driver, "version", missing)
    with pytest.raises(UserError, match="vLLM is not installed here"):
        check_job(job(VLLM), VerlConfig())


def test_vllm_may_look_ahead_on_its_second_runner_and_where_nobody_reads_its_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead = job({**VLLM, f"{ROLLOUT}.engine_kwargs.vllm.async_scheduling": True})
    check_job(ahead, VerlConfig(metrics=True))
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    check_job(ahead, VerlConfig(metrics=False))


def test_the_second_runner_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    second = VerlConfig(metrics=True, model_runner="v2")
    check_job(job(VLLM), second)
    with pytest.raises(UserError, match=r"bebop.model_runner='v2' .* it is vLLM's; give null"):
        check_job(job(), second)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=r"bebop.model_runner='v2' .* Triton's interpreter, .* or give v1"):
        check_job(job(VLLM), second)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_job(job(VLLM), second)
    with pytest.raises(UserError, match=r"model_runner.*v3"):
        parse({"model_runner": "v3"})


def test_a_checkpoint_without_a_head_is_seen_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((resolve("tiny") / "config.json").read_text())
    config = job({f"{MODEL}.path": str(tmp_path)})
    with pytest.raises(UserError, match=r"has no MTP weights .* set bebop.init_head=true"):
        check_job(config, VerlConfig(train_head=True))
    check_job(config, VerlConfig(train_head=True, init_head=True))


def constants() -> Any:
    return SimpleNamespace(get_ppo_ray_runtime_env=lambda config=None: {"env_vars": {"A": "1"}})


def test_the_driver_hands_the_block_to_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXTERNAL, "somebody.elses")
    module = constants()
    hand_over(module)
    block = {"metrics": True, "train_head": True, "verify_every": 4}
    found = module.get_ppo_ray_runtime_env(job({"bebop": block}))["env_vars"]
    monkeypatch.setenv(VARIABLE, found[VARIABLE])
    assert found["A"] == "1" and found[EVERY] == "4" and found[SELECTOR] == "all"
    assert found[EXTERNAL] == "somebody.elses,bebop.verl_job.plugin"
    assert OmegaConf.create(found)[VARIABLE] == found[VARIABLE]  # verl merges it as a configuration
    assert parse(block).parts == ("metrics", "train_head")


def test_a_head_learns_what_rollouts_sample_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = constants()
    hand_over(module)
    cut = {f"{ROLLOUT}.top_p": 0.9, f"{ROLLOUT}.top_k": -1}

    def told(changes: dict[str, Any], **head: Any) -> VerlConfig | None:
        block = {"bebop": {"train_head": True, "head": head}}
        found = module.get_ppo_ray_runtime_env(job({**cut, **changes, **block}))["env_vars"]
        return current(found)

    for changes, wanted in (({}, (0.9, 0)), ({f"{ROLLOUT}.top_p": 1.0, f"{ROLLOUT}.top_k": 20}, (1.0, 20))):
        config = told(changes)
        assert config is not None and (config.rollout_top_p, config.rollout_top_k) == wanted
    megatron = {f"{ACTOR}.strategy": "megatron", f"{MODEL}.mtp.enable_train": True}
    split = {**megatron, f"{ACTOR}.megatron.tensor_model_parallel_size": 2}
    for changes, head, word in (({}, {"objective": "rkl"}, "head.objective='rkl'"), (split, {}, "parallel_size=2")):
        with pytest.raises(SystemExit):
            told(changes, **head)
        assert word in capsys.readouterr().err
    told({**split, f"{ROLLOUT}.top_p": 1.0})


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (VLLM, "rejection"),
        ({f"{ROLLOUT}.engine_kwargs.sglang.speculative_use_block_verification": True}, "block"),
        (EMBEDDED, "rejection"),
        ({**EMBEDDED, f"{ROLLOUT}.engine_kwargs.bebop.system": "bebop_block"}, "block"),
        ({**EMBEDDED, f"{ROLLOUT}.engine_kwargs.bebop.system": "bebop_tree"}, "tree_walk"),
    ],
)
def test_the_monitor_learns_by_what_rule_rollouts_accept(changes: dict[str, Any], rule: str) -> None:
    assert with_rollout(job(changes), VerlConfig()).rollout_rule == rule


def test_a_head_with_experts_is_refused_beside_a_policy_on_megatron() -> None:
    mtp = SimpleNamespace(enable=True, enable_train=True)
    settings = SimpleNamespace(dynamic_context_parallel=False, use_megatron_fsdp=False)
    refused = pytest.raises(UserError, match="head with experts is not trained beside a policy")
    for config, expected in ((SimpleNamespace(num_experts=8), refused), (SimpleNamespace(), nullcontext())):
        engine = SimpleNamespace(model_config=SimpleNamespace(mtp=mtp, hf_config=config), engine_config=settings)
        with expected:
            megatron_engine.check(engine)


def test_a_head_from_a_checkpoint_of_verls_own_is_what_training_goes_on_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a folder of ours the fp32 weights are taken from the model, after verl has loaded it."""
    done: list[str] = []

    class Engine:
        def _build_megatron_module(self) -> None: ...
        def _build_optimizer(self) -> None: ...
        def train_batch(self) -> None: ...
        def save_checkpoint(self) -> None: ...
        def load_checkpoint(self, local_path: str | None) -> None:
            done.append("verl")

    monkeypatch.setattr(megatron_engine, "current", VerlConfig)
    megatron_engine.train_beside(SimpleNamespace(MegatronEngine=Engine))  # type: ignore[arg-type]
    engine: Any = Engine()
    engine.load_checkpoint(str(tmp_path))
    assert done == ["verl"], "an engine without a head of ours is verl's alone"
    setattr(
        engine, megatron_engine.ENGINE, SimpleNamespace(backend=SimpleNamespace(loaded=lambda: done.append("ours")))
    )
    engine.load_checkpoint(str(tmp_path))
    engine.load_checkpoint(None)
    assert done == ["verl", "verl", "ours", "verl", "ours"]


def test_what_the_configuration_names_and_the_user_names_are_both_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXTERNAL, "somebody.elses")
    module = constants()
    hand_over(module)
    variables = {EXTERNAL: "bebop.verl_job.plugin", "B": "2"}
    config = job({"bebop": {"metrics": True}, "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": variables}}}})
    OmegaConf.set_struct(config, True)  # as Hydra hands it over
    module.get_ppo_ray_runtime_env(config)
    wanted = {EXTERNAL: "somebody.elses,bebop.verl_job.plugin", "B": "2"}
    assert OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars) == wanted


@pytest.mark.parametrize("platform", ["cpu", ""])
def test_vllms_processes_are_told_what_to_look_at(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", platform)
    module = constants()
    hand_over(module)
    names = ("BEBOP_VERIFY_EVERY", "BEBOP_VLLM_DRAFTS", "VLLM_USE_V2_MODEL_RUNNER", "BEBOP_VLLM_CPU")

    def told(changes: dict[str, Any], **block: Any) -> list[str | None]:
        config = job({**VLLM, **changes, "bebop": {"metrics": True, "verify_every": 0} | block})
        found = module.get_ppo_ray_runtime_env(config)["env_vars"]
        scheduled = config.actor_rollout_ref.rollout.engine_kwargs.vllm.async_scheduling
        assert scheduled is (
            False if found.get("VLLM_USE_V2_MODEL_RUNNER") == "0" and block.get("metrics", True) else None
        )
        return [found.get(name) for name in names]

    cpu, runner = ("1", "0") if platform else (None, "1")
    assert told({}) == ["0", "3", runner, cpu]
    assert told({}, model_runner="v1") == ["0", "3", "0", cpu]
    assert told({f"{MODEL}.mtp.num_speculative_tokens": 2}, verify_every=4) == ["4", "2", runner, cpu]
    for own in ({"num_speculative_tokens": 5}, '{"num_speculative_tokens": 5}'):
        assert told({f"{ROLLOUT}.engine_kwargs.vllm.speculative_config": own})[1] == "5", "verl lets it decide"
    assert told({}, metrics=False) == [None, None, None, cpu]
    assert told({}, metrics=False, model_runner="v1") == [None, None, "0", cpu]
    assert told({f"{MODEL}.mtp.enable_rollout": False})[1:] == [None, None, cpu]


@pytest.mark.parametrize("platform", ["cpu", ""])
def test_sglangs_processes_report_whole_completions(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", platform)
    module = constants()
    hand_over(module)
    for verify_every, interval in ((4, str(1 << 30)), (0, None)):
        config = job({"bebop": {"metrics": True, "verify_every": verify_every}})
        found = module.get_ppo_ray_runtime_env(config)["env_vars"]
        assert found.get("SGLANG_FORCE_STREAM_INTERVAL") == interval
        wanted = ["1", "1"] if platform else [None, None]
        assert [found.get(name) for name in ("TRITON_INTERPRET", "BEBOP_SGLANG_CPU")] == wanted


def test_without_a_block_nothing_is_handed_over() -> None:
    module = constants()
    hand_over(module)
    assert module.get_ppo_ray_runtime_env(job())["env_vars"] == {"A": "1"}
    assert module.get_ppo_ray_runtime_env()["env_vars"] == {"A": "1"}


def test_the_driver_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    module = constants()
    hand_over(module)
    with pytest.raises(SystemExit) as caught:
        module.get_ppo_ray_runtime_env(job({"bebop": {"monitor": True}}))
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: bebop.monitor=True is not possible: it takes bebop.metrics=true\n"


def test_the_self_test_names_the_part_that_did_not_take() -> None:
    wanted = VerlConfig(metrics=True, train_head=True)
    own, worker = ("metrics.report_v1",), ("head.train_beside",)
    assert verdict(wanted, own, [worker, worker], "fsdp2") == "metrics, train_head"
    with pytest.raises(UserError, match=r"bebop.train_head=True did not take: head.train_beside in worker 1"):
        verdict(wanted, own, [worker, ()], "fsdp2")
    with pytest.raises(UserError, match=r"bebop.train_head=True did not take: megatron_engine.train_beside"):
        verdict(wanted, own, [worker], "megatron")
    with pytest.raises(UserError, match=r"bebop.metrics=True did not take: metrics.report_v1"):
        verdict(wanted, (), [worker], "fsdp2")
    with pytest.raises(UserError, match=f"{VARIABLE} is not set"):
        verdict(None, own, [worker], "fsdp2")
