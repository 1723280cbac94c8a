"""Every setting that a user can get wrong is refused in one line; the YAML files and the dataclasses agree."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from bebop.config.adapt import AdaptConfig
from bebop.config.certify import CertifyConfig
from bebop.config.compose import (
    adapt_config,
    certify_config,
    groups,
    job_config,
    model_defaults,
    of_model,
    simulate_config,
)
from bebop.config.fields import MAX_INT, from_dict, settings
from bebop.config.job import (
    HELD_OUT_SEED,
    UNBOUNDED,
    JobConfig,
    ObjectiveName,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from bebop.config.simulate import SimulateConfig
from bebop.errors import UserError
from bebop.kernels.draft_losses import LOSSES
from bebop.systems import SYSTEMS
from bebop.trainer.objectives import OBJECTIVES
from tests.cases import slow_but

NAN, INF = float("nan"), float("inf")
BAD: list[tuple[str, Any]] = [
    ("model.draft", "no/such/folder"),
    ("model.path", "no/such/folder"), ("model.device", "gpu"), ("model.device", "cuda:"),
    ("model.dtype", "float16"), ("model.dtype", True), ("model.date", "yesterday"), ("model.date", "20261129"),
    ("task.source", "web"), ("task.seed", -1), ("task.size", 0), ("decoding.system", "warp"),
    ("cotrain.head.objective", "xyz"),
    ("rollout.engine", "trtllm"), ("rollout.workers", 0), ("rollout.slots", 0), ("rollout.threads", -1),
    ("rollout.dispatch", "push"), ("rollout.in_flight", 0),
    ("rollout.staleness", -1), ("rollout.max_length", 160), ("rollout.on_update", "drop"), ("rollout.on_update", False),
    ("rollout.parked_bytes", -1), ("rollout.torch.prefill_tokens", 15), ("rollout.torch.paged_cache", "some"),
    ("rollout.torch.cache_tokens", 0),
    ("rollout.sampling.temperature", -0.1), ("rollout.sampling.temperature", 0.0),
    ("rollout.sampling.temperature", NAN), ("rollout.sampling.temperature", INF),
    ("rollout.sampling.top_k", -1), ("rollout.sampling.top_p", 0.0), ("rollout.sampling.top_p", 1.5),
    ("rollout.sampling.min_p", 1.0), ("rollout.sampling.min_p", -0.5),
    ("rollout.sampling.repetition_penalty", 0.0), ("rollout.sampling.repetition_penalty", INF),
    ("cotrain.head.depth", 0), ("rollout.sampling.max_new_tokens", 0), ("rollout.sampling.stop", ["x", ""]),
    ("decoding.draft_tokens", -1), ("decoding.draft_tokens", 17), ("decoding.draft_temperature", -1.0),
    ("decoding.most_drafts", 0), ("decoding.cost_ratio", -0.1), ("decoding.verify_ratio", NAN),
    ("algorithm.advantage", "gae"), ("algorithm.aggregation", "mean"), ("algorithm.clip_low", 0.0),
    ("algorithm.policy_loss", "ppo"),
    ("algorithm.clip_low", 1.1), ("algorithm.clip_high", 0.0), ("algorithm.kl_coefficient", -1.0),
    ("algorithm.entropy_coefficient", NAN), ("algorithm.entropy_target", 0.0), ("algorithm.entropy_target", 3.0),
    ("algorithm.tis_cap", 0.5), ("algorithm.minibatches", 0),
    ("algorithm.minibatches", 3), ("algorithm.tis_level", "answer"),
    ("trainer.ranks", 0), ("trainer.threads", 0), ("trainer.steps", 0), ("trainer.groups_per_step", 0),
    ("trainer.group_size", 1), ("trainer.lr", -1e-4), ("trainer.lr", NAN), ("trainer.lr", INF),
    ("trainer.lr_warmup_steps", -1), ("trainer.lr_schedule", "step"), ("trainer.betas", [0.9, 1.0]),
    ("trainer.betas", [-0.1, 0.9]), ("trainer.weight_decay", -0.1), ("trainer.max_grad_norm", 0.0),
    ("trainer.max_tokens", 0), ("trainer.checkpointing", "some"), ("trainer.gradient_sync", "never"),
    ("trainer.router_aux_loss", -0.1), ("trainer.publish", "nccl"), ("trainer.broadcast.backend", "mpi"),
    ("trainer.broadcast.bucket", 0), ("trainer.broadcast.bucket", 16385),
    ("trainer.save_every", -1), ("trainer.keep", 0),
    ("trainer.lora.rank", -1), ("trainer.lora.rank", 4097), ("trainer.lora.alpha", 0.0), ("trainer.lora.alpha", 16.0),
    ("trainer.lora.target_modules", []), ("trainer.lora.target_modules", [""]), ("trainer.lora.target_modules", ["x"]),
    ("runtime.max_restarts", -1), ("runtime.hang_after", 0.0), ("runtime.port", 65536), ("runtime.dashboard_port", -1),
    ("runtime.metrics_port", 70000), ("runtime.seed", -1), ("runtime.seed", 1 << 23), ("runtime.resume", True),
    ("task.reward", ""), ("task.reward", []), ("task.reward", 3), ("task.reward", ["auto", "auto"]),
    ("task.reward", ["auto", ""]), ("task.reward_weights", [1.0, 2.0]), ("task.reward_weights", [INF]),
    ("task.reward_batch", 0), ("task.reward_signature", "openai"),
    ("runtime.sample_every", -1),
    ("task.name", ""), ("task.prompt_key", " "), ("task.answer_key", ""), ("monitor.probe_every", -1),
    ("monitor.probe_completions", 1), ("monitor.check_completions", -1), ("monitor.certify_every", -1),
    ("monitor.trace", "some"), ("runtime.dir", ""), ("runtime.address", " "),
    ("runtime.temp_dir", ""), ("cotrain.mode", "sometimes"), ("cotrain.head.lr", NAN), ("cotrain.head.max_tokens", 0),
    ("cotrain.head.lr_warmup_steps", -1), ("cotrain.head.betas", [1.0, 0.9]), ("cotrain.head.weight_decay", -1.0),
    ("cotrain.head.max_grad_norm", 0.0),
    ("task.reward_timeout", 0.0), ("task.reward_timeout", INF), ("task.reward_timeout", NAN),
    ("task.environment.max_turns", 0), ("task.environment.max_turns", 10_001), ("task.environment.max_seconds", 0.0),
    ("task.environment.reset_seconds", 0.0), ("task.environment.reset_seconds", INF),
    ("task.environment.step_seconds", -1.0), ("task.environment.step_seconds", NAN),
    ("task.environment.max_restarts", -1), ("task.environment.processes", 0), ("task.environment.processes", 1025),
    ("evaluation.every", -1), ("evaluation.size", 0), ("evaluation.size", 65537), ("evaluation.samples", -1),
    ("evaluation.samples", 4097), ("evaluation.k", 0), ("evaluation.k", 5), ("evaluation.temperature", -1.0),
    ("evaluation.temperature", NAN), ("evaluation.threshold", INF), ("evaluation.best_by", "loss"),
]  # fmt: skip


def nested(name: str, value: object) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for a.b."""
    for part in reversed(name.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def message(values: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        from_dict(JobConfig, values)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 320
    return text


@pytest.mark.parametrize("name", ["system", "reward", "reward_weights"])
def test_what_an_environment_gives_itself_is_refused(name: str) -> None:
    given = [1.0] if name == "reward_weights" else "a.py:b"
    text = message({"task": {"source": "environment", "name": "guess", name: given}})
    assert text.startswith(f"task.{name}=") and "an environment gives it" in text


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: str(v))
def test_a_value_that_is_not_possible_is_named(name: str, value: object) -> None:
    shown = {True: "on", False: "off"}[value] if isinstance(value, bool) and name != "runtime.resume" else value
    text = message(nested(name, value))
    assert text.startswith(f"{name}={shown!r} is not possible: ")
    allowed = text.split(": ", 1)[1]
    assert re.search(r"give|choose|must|wanted|end every|two numbers|> 0", allowed)


def test_every_limit_has_a_case() -> None:
    limited = {one.name for one in settings(JobConfig) if one.limit is not None}
    engines = ("rollout.sglang.", "rollout.vllm.")  # tests/rollout/{sglang,vllm}/test_arguments.py
    engine = {name for name in limited if name.startswith(engines)}
    assert limited - engine - {name for name, _ in BAD} == set()


@pytest.mark.parametrize(("name", "value"), [("top_k", 5), ("top_p", 0.9), ("min_p", 0.1), ("repetition_penalty", 1.2)])
def test_training_on_truncated_distributions_needs_rescoring(name: str, value: float) -> None:
    sampling = {"rollout": {"sampling": {name: value}}}
    text = message(sampling)
    assert text.startswith("rollout.sampling={") and f"'{name}': {value}" in text and "algorithm.rescore=true" in text
    made = from_dict(JobConfig, {**sampling, "algorithm": {"rescore": True}})
    assert getattr(made.rollout.sampling, name) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("head.objective", {"head": {"objective": "rkl"}}),
        ("train.warm_objective", {"train": {"warm_objective": "rkl"}}),
        ("options.objective", {"part": "block", "options": {"objective": "rkl"}}),
        ("options.objective", {"part": "eagle3", "options": {"objective": "rkl"}}),
        ("cotrain.head.objective", {"cotrain": {"mode": "always", "head": {"objective": "rkl"}}}),
    ],
)
@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.9}])
def test_an_objective_that_is_infinite_beside_a_truncated_target_is_refused(
    name: str, values: dict[str, Any], cut: dict[str, Any]
) -> None:
    job = "cotrain" in values
    cls: type[Any] = JobConfig if job else AdaptConfig
    sampling = {"rollout": {"sampling": cut}, "algorithm": {"rescore": True}} if job else {"data": {"sampling": cut}}
    with pytest.raises(UserError, match=rf"^{name}='rkl' is not possible: it is infinite where top_p or top_k cuts"):
        from_dict(cls, values | sampling)
    assert from_dict(cls, values) and from_dict(cls, sampling)


def test_what_goes_ill_with_environments_and_filtered_groups_is_refused() -> None:
    stop = message({"task": {"source": "environment", "name": "guess"}, "rollout": {"sampling": {"stop": ["."]}}})
    assert stop.startswith("rollout.sampling.stop=['.'] is not possible: ")
    chosen = message({"algorithm": {"dynamic_sampling": True}, "monitor": {"certify_every": 5}})
    assert chosen.startswith("monitor.certify_every=5 is not possible: ")
    assert from_dict(JobConfig, {"algorithm": {"dynamic_sampling": True}, "monitor": {"certify_every": 0}})


def test_what_an_evaluation_takes_over_and_what_it_refuses() -> None:
    gcd = {"name": "gcd", "args": {"max_value": 60}, "seed": 5, "size": 7}
    same = from_dict(JobConfig, {"task": gcd, "evaluation": {"every": 1}}).held_out_task
    assert (same.name, same.args, same.size) == ("gcd", gcd["args"], None) and same.seed == 5 + HELD_OUT_SEED
    highest = from_dict(JobConfig, {"task": {"seed": MAX_INT}, "evaluation": {"every": 1}}).held_out_task
    assert highest.seed == MAX_INT - HELD_OUT_SEED
    other = from_dict(JobConfig, {"task": gcd, "evaluation": {"every": 1, "task": {"name": "lcm", "seed": 3}}})
    assert other.held_out_task.args == {} and other.held_out_task.seed == 3, "arguments are of one data set"
    turns = {"source": "environment", "name": "guess"}
    assert from_dict(JobConfig, {"task": turns, "evaluation": {"every": 1, "task": {"seed": 9}}}).held_out_task.turns
    for wanted, task, evaluation in (
        ("evaluation.task.nme", gcd, {"task": {"nme": "lcm"}}),
        ("evaluation.task.seed=-1", gcd, {"task": {"seed": -1}}),
        ("evaluation.task={'name': 'store'}", turns, {"task": {"name": "store"}}),
        ("evaluation.task.source='environment'", gcd, {"task": turns}),
        ("evaluation.path=None", {"source": "file", "path": __file__.replace(".py", ".jsonl")}, {}),
        ("evaluation.path='no.jsonl'", gcd, {"path": "no.jsonl"}),
        ("evaluation.samples=0", gcd, {"samples": 0, "greedy": False}),
        ("evaluation.best_by='pass_at_k'", gcd, {"samples": 0, "best_by": "pass_at_k"}),
        ("evaluation.best_by='greedy_reward'", gcd, {"greedy": False, "best_by": "greedy_reward"}),
    ):
        found = message({"task": task, "evaluation": {"every": 1, **evaluation}})
        assert found.startswith(wanted) or task["source"] == "file", found


WRONG_TYPES = [
    ("trainer.steps", 2.0, "a whole number"), ("trainer.steps", True, "a whole number"),
    ("trainer.steps", "5", "a whole number"), ("trainer.steps", None, "a whole number"),
    ("trainer.lr", "", "a number"), ("trainer.lr", False, "a number"), ("trainer.lr", "2e-4", "a number"),
    ("model.init_mtp", 1, "true or false"), ("model.init_mtp", "true", "true or false"),
    ("model.device", 0, "a text"), ("runtime.dir", 5, "a text"), 
    ("decoding.draft_temperature", "cold", "a number or auto"), ("decoding.draft_temperature", True, "a number"),
    ("task.args", [1], "a mapping"), ("trainer", 3, "a mapping"), ("rollout.sampling", None, "a mapping"),
    ("rollout.sampling.stop", "\n\n", "a list"), ("rollout.sampling.stop", [1], "a text"),
    ("trainer.betas", 0.9, "a list"), ("trainer.betas", [0.9], "2 values"),
    ("trainer.betas", [0.9, "x"], "a number"), ("trainer.betas", [True, 0.9], "a number"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "wanted"), WRONG_TYPES, ids=lambda v: str(v))
def test_wrong_types_are_named(name: str, value: object, wanted: str) -> None:
    verb = "are" if wanted.endswith("values") else "is"
    culprits = value if isinstance(value, list) and wanted in ("a text", "a number") else [value]
    texts = [f"{name}={culprit!r} is not possible: {wanted} {verb} wanted here" for culprit in culprits]
    assert message(nested(name, value)) in texts


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("modle", "did you mean model? there are model, task"),
        ("trainer.learning_rate", "there are ranks, threads"),
        ("rollout.sampling.topk", "did you mean rollout.sampling.top_k? there are temperature, top_k"),
    ],
)
def test_unknown_names_are_refused_with_those_there_are(name: str, there: str) -> None:
    assert message(nested(name, 1)).startswith(f"{name}=1 is not possible: no such setting; {there}")


def test_values_take_the_annotated_type() -> None:
    made = from_dict(TrainerConfig, {"lr": 1, "betas": [0, 0.5], "max_grad_norm": INF})
    assert made.lr == 1.0 and type(made.lr) is float
    assert made.betas == (0.0, 0.5) and [type(b) for b in made.betas] == [float, float]
    assert from_dict(JobConfig, {"decoding": {"draft_temperature": "auto"}}).decoding.chooses_temperature
    nothing = from_dict(JobConfig, {"decoding": {"draft_temperature": None}, "runtime": {"dir": None}})
    assert nothing == JobConfig()
    sampling = from_dict(RolloutConfig, {"sampling": {"stop": ["a", "b"]}}).sampling
    assert sampling == SamplingConfig(stop=("a", "b"))


def test_names_are_those_of_the_registries() -> None:
    assert get_args(ObjectiveName) == tuple(OBJECTIVES)
    divergences = {name: loss.divergence for name, loss in LOSSES.items() if loss.divergence is not None}
    assert tuple(name for name, one in divergences.items() if not one.bounded) == UNBOUNDED


def test_everything_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        JobConfig().trainer.steps = 3  # type: ignore[misc]


REFUSED = [("decoding", name) for name, system in SYSTEMS.items() if system.train_error]  # tests/rollout has them
CHOICES = [(group, one) for group, choices in groups().items() for one in choices if (group, one) not in REFUSED]


@pytest.mark.parametrize(
    ("group", "choice"), slow_but({group: (group, one) for group, one in CHOICES}.values(), CHOICES, several=True)
)
def test_every_choice_of_every_group_composes(group: str, choice: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1+1", "answer": "2"}\n')
    needs = {"folder": [f"model.path={tmp_path}"], "file": [f"task.path={file}"]}
    needs |= {name: ["model.draft=tiny"] for name, system in SYSTEMS.items() if system.separate}
    made = job_config([f"{group}={choice}", *needs.get(choice, [])])
    assert isinstance(made, JobConfig)
    if choice in needs:
        with pytest.raises(UserError, match=rf"^{group}\.path|^model\.draft"):
            job_config([f"{group}={choice}"])


def leaves(values: dict[str, Any], where: str = "") -> dict[str, Any]:
    """``{"a.b": value}`` of nested mappings; ``task.args`` is one value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, dict) and f"{where}{name}" != "task.args"
        flat |= leaves(value, f"{where}{name}.") if inner else {f"{where}{name}": value}
    return flat


OF_FOLDERS = {name: value for name, value in of_model("any folder").items() if name != "trainer.lr"}
SUMS = {"task.args": {"min_terms": 8, "max_terms": 11, "min_digits": 1, "max_digits": 1}}
COMPOSED: list[tuple[list[str], dict[str, Any]]] = [  # overrides; what differs from the dataclasses' defaults
    ([], SUMS),
    (["trainer=default", "algorithm=grpo", "monitor=default", "runtime=default", "~trainer"], SUMS),
    (["task=gcd", "task.seed=3"],
     {"task.name": "gcd", "task.args": {"min_value": 10, "max_value": 60}, "task.seed": 3}),
    (["model=smollm2"], SUMS | {"model.path": "smollm2", "model.init_mtp": True} | of_model("smollm2")),
    (["model=folder", "model.path=.", "trainer.lr=2e-4"], SUMS | {"model.path": "."} | OF_FOLDERS),
    (["trainer.lr=2e-4", "model.path=."], SUMS | {"model.path": "."} | OF_FOLDERS),
    (["model.path=smollm2"], SUMS | {"model.path": "smollm2", "model.init_mtp": True} | of_model("smollm2")),
    (["model.path=tiny"], SUMS),
    (["rollout=sglang", "rollout.sglang.urls=['http://a:1']"],
     SUMS | {"rollout.engine": "sglang", "rollout.sglang.urls": ("http://a:1",)}),
    (["rollout=vllm", "rollout.vllm.eager=true"],
     SUMS | {"rollout.engine": "vllm", "rollout.vllm.eager": True}),
    (["decoding=bebop_adaptive"], SUMS | {"decoding.system": "bebop_adaptive", "decoding.draft_tokens": 5}),
    (["task=environment", "task.name=store", "task.environment.max_turns=4"],
     {"task.source": "environment", "task.name": "store", "task.environment.max_turns": 4}),
    (["cotrain=auto", "cotrain.head={lr:1.0}"], SUMS | {"cotrain.mode": "auto", "cotrain.head.lr": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "differing"),
    slow_but(COMPOSED[::3], COMPOSED, several=True),
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_job_is_the_defaults_of_the_dataclasses_and_what_was_chosen(
    overrides: list[str], differing: dict[str, Any]
) -> None:
    defaults = leaves(dataclasses.asdict(JobConfig()))
    made = leaves(dataclasses.asdict(job_config(overrides)))
    assert {name: value for name, value in made.items() if value != defaults[name]} == differing


def test_real_models_do_not_get_the_learning_rate_of_the_built_in_one() -> None:
    assert of_model("tiny") == of_model("tiny", "adapt") == {} and of_model("smollm2")["trainer.lr"] == 1e-5
    config = job_config(["model.path=.", "rollout.slots=8", "algorithm.kl_coefficient=0"])
    assert config.trainer.lr == 1e-6 and config.rollout.sampling.max_new_tokens > 160
    assert model_defaults(config).keys() == of_model(".").keys() - {"rollout.slots", "algorithm.kl_coefficient"}
    assert adapt_config(["model.path=."]).head.lr == 3.5e-5 and of_model("smollm2", "adapt") == {"head.lr": 5e-4}


@pytest.mark.parametrize(
    ("cls", "read", "differing"),
    [
        (AdaptConfig, adapt_config, {"task.name": "composite", "head.lr": 0.002, "head.lr_warmup_steps": 5}),
        (CertifyConfig, certify_config, {"task.name": "composite"}),
        (SimulateConfig, simulate_config, {}),
    ],
)
def test_other_commands_differ_from_the_dataclasses_in_the_task_and_the_learning_rate(
    cls: type, read: Callable[[list[str]], Any], differing: dict[str, Any]
) -> None:
    defaults, made = (leaves(dataclasses.asdict(config)) for config in (cls(), read([])))
    assert {name: value for name, value in made.items() if value != defaults[name] and name != "task.args"} == differing


@pytest.mark.parametrize(
    "override",
    ["task.path=x", "rollout.sglang.retries=1", "rollout.vllm.eager=true", "trainer=settings", "task=file_settings"],
)
def test_settings_of_another_choice_are_refused(override: str) -> None:
    with pytest.raises(UserError, match=r"no such setting|choose one of"):
        job_config([override])
