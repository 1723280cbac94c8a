"""Recipes as YAML files that name GPUs, model and job; a recipe whose parts do not fit together is refused."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from bebop.config.compose import job_config
from bebop.config.fields import Settings, at_least, choice, from_dict, setting
from bebop.config.job import MAX_BATCH_TOKENS, JobConfig
from bebop.config.simulate import CompletionsConfig, MemoryConfig, SimulateConfig
from bebop.errors import UserError
from bebop.simulation.memory import Question
from bebop.simulation.roofline import GPUS, MODELS, Gpu
from recipes.cluster.roofline import Lengths, Plan, Roofline

FOLDER = Path(__file__).parent / "recipes"
TrainerName = Literal["own", "verl"]
# Settings of a simulation that follow from the job and the roofline.
DERIVED = {
    "fleet": ("workers", "slots", "staleness", "groups_per_step", "group_size", "gpus_per_worker", "trainer_gpus"),
    "completions": ("longest", "draft_tokens"),
}
GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFile(Settings):
    """Contents of a recipe file."""

    about: str = setting("", "a line")
    gpu: str = setting("h100", "a row of PEAKS in benchmarks/peaks.py", choice(GPUS))
    machines: int = setting(1, "with 8 GPUs each", at_least(1))
    model: str = setting("mimo-7b", "a row of MODELS in bebop/simulation/roofline.py", choice(MODELS))
    trainer: TrainerName = setting("own", "Bebop's, or verl's")
    group: str = setting("reasoning", "of verl's settings, for trainer: verl: recipes/verl/conf/bebop")
    sequence_parallel: int = setting(1, "GPUs of the trainer that share one answer, for trainer: verl", at_least(1))
    prompt_tokens: int = setting(2048, "tokens of the longest prompt", at_least(1))
    environment_seconds: float = setting(0.0, "that one step of an environment takes, assumed", at_least(0))
    job: tuple[str, ...] = setting((), "overrides of python -m bebop.run")
    simulate: dict[str, Any] = field(default_factory=dict)

    def _validate(self) -> None:
        alone = self.trainer == "verl" or self.sequence_parallel == 1
        self.require(alone, "sequence_parallel", "bebop's trainer does not split a completion")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe whose parts fit its GPUs."""

    name: str
    file: RecipeFile
    job: JobConfig
    roofline: Roofline
    simulation: SimulateConfig

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all machines."""
        return self.file.machines * self.roofline.gpu.per_machine


def names() -> list[str]:
    """Return the names of all recipes, smallest first."""
    return sorted((file.stem for file in FOLDER.glob("*.yaml")), key=lambda name: (int(name.split("-")[0]), name))


def load(name: str, folder: Path = FOLDER) -> Recipe:
    """Return a recipe by its name; raise ``UserError`` if there is none, or if it is impossible."""
    path = folder / f"{name}.yaml"
    if "/" in name or not path.is_file():
        raise UserError(f"{name!r} is no recipe; there are {', '.join(names())}")
    try:
        read = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"recipe {name}: no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(read, dict):
        raise UserError(f"recipe {name}: a mapping is wanted, not {read!r:.80}")
    try:
        return build(name, from_dict(RecipeFile, read))
    except UserError as error:
        raise UserError(f"recipe {name}: {error}") from None


def build(name: str, file: RecipeFile) -> Recipe:
    """Return a recipe with all settings derived from its file; raise ``UserError`` if they do not fit together."""
    given = any(override.startswith("model.path=") for override in file.job)
    job = job_config([*file.job, *["model.path=tiny"] * (not given)])  # the folder is its user's
    for section, keys in DERIVED.items():
        for key in set(file.simulate.get(section) or ()) & set(keys):
            raise UserError(f"simulate.{section}.{key} is not possible: it follows from job")
    if "costs" in file.simulate:
        raise UserError("simulate.costs is not possible: they follow from gpu, model and job")
    answers = from_dict(
        CompletionsConfig, {**file.simulate.get("completions", {}), **_answers(job)}, "simulate.completions."
    )
    gpu = GPUS[file.gpu]
    plan = _plan(file, job, gpu)
    roofline = Roofline(gpu, MODELS[file.model], plan, Lengths.of(answers))
    _check_counts(file, job, roofline)
    _check_memory(file, job, roofline)
    simulation = from_dict(
        SimulateConfig,
        {
            **file.simulate,
            "fleet": {**file.simulate.get("fleet", {}), **_fleet(job)},
            "completions": asdict(answers),
            "costs": asdict(roofline.costs(job.decoding.limit)),
        },
        "simulate.",
    )
    return Recipe(name, file, job, roofline, simulation)


def _answers(job: JobConfig) -> dict[str, Any]:
    return {"longest": job.rollout.sampling.max_new_tokens, "draft_tokens": job.decoding.limit}


def _fleet(job: JobConfig) -> dict[str, Any]:
    rollout, trainer = job.rollout, job.trainer
    return {
        "workers": rollout.workers,
        "slots": rollout.slots,
        "staleness": rollout.staleness,
        "groups_per_step": trainer.groups_per_step,
        "group_size": trainer.group_size,
        "gpus_per_worker": rollout.sglang.tensor_parallel,
        "trainer_gpus": trainer.ranks,
    }


def _plan(file: RecipeFile, job: JobConfig, gpu: Gpu) -> Plan:
    own = file.trainer == "own"
    longest = job.rollout.max_length
    return Plan(
        tensor_parallel=job.rollout.sglang.tensor_parallel,
        slots=job.rollout.slots,
        trainer_gpus=job.trainer.ranks,
        sequence_parallel=file.sequence_parallel,
        recompute=not own or own_trainer(file, job).checkpointing,
        micro_batch=max(job.trainer.max_tokens or MAX_BATCH_TOKENS, longest) if own else longest,
        by_network=not own,
        one_machine=file.machines == 1,
    )


def own_trainer(file: RecipeFile, job: JobConfig) -> Question:
    """Return the question about the memory of Bebop's own trainer, with its longest completion in one micro-batch."""
    trainer = job.trainer
    asked = MemoryConfig(
        model=file.model,
        gpu=file.gpu,
        gpus=min(trainer.ranks, 8),  # more are refused by ``_check_counts``
        dtype=job.model.dtype,  # type: ignore[arg-type]
        max_tokens=max(trainer.max_tokens or MAX_BATCH_TOKENS, job.rollout.max_length),
        checkpointing=trainer.checkpointing,
    )
    return Question.of(asked)


def _check_counts(file: RecipeFile, job: JobConfig, roofline: Roofline) -> None:
    """Check that engines and trainer use all GPUs, and that each part fits on the machines it needs."""
    gpu, plan = roofline.gpu, roofline.plan
    have = file.machines * gpu.per_machine
    wanted = job.rollout.workers * plan.tensor_parallel + plan.trainer_gpus
    if wanted != have:
        raise UserError(f"engines and trainer take {wanted} GPUs, the machines have {have}")
    if plan.tensor_parallel > gpu.per_machine:
        name = "rollout.sglang.tensor_parallel"
        raise UserError(f"{name}={plan.tensor_parallel} is not possible: a machine has {gpu.per_machine} GPUs")
    if file.trainer == "own" and plan.trainer_gpus > gpu.per_machine:
        raise UserError(
            f"trainer.ranks={plan.trainer_gpus} is not possible: ranks of bebop's own trainer lie on one machine, "
            f"which has {gpu.per_machine} GPUs; use trainer: verl"
        )
    if file.trainer == "verl" and file.machines > 1 and plan.trainer_gpus % gpu.per_machine:
        raise UserError(f"trainer.ranks={plan.trainer_gpus} is not possible: verl's trainer takes whole machines")
    if plan.trainer_gpus % plan.sequence_parallel:
        raise UserError(f"sequence_parallel={plan.sequence_parallel} is not possible: it must divide trainer.ranks")
    room = job.rollout.max_length - job.rollout.sampling.max_new_tokens
    if room < file.prompt_tokens:
        raise UserError(f"rollout.max_length leaves {room} tokens for a prompt; prompt_tokens={file.prompt_tokens}")


def trainer_bytes(file: RecipeFile, job: JobConfig, roofline: Roofline) -> float:
    """Return the bytes that the trainer takes on one of its GPUs."""
    return own_trainer(file, job).total if file.trainer == "own" else roofline.trainer_bytes()


def _check_memory(file: RecipeFile, job: JobConfig, roofline: Roofline) -> None:
    """Check that engine and trainer fit into the memory of their GPUs."""
    room = roofline.gpu.memory * roofline.gpu.usable
    trainer = trainer_bytes(file, job, roofline)
    for part, wanted in (("an engine", roofline.engine_bytes()), ("the trainer", trainer)):
        if wanted > room:
            words = f"{wanted / GIGABYTE:.0f} GB on each of its GPUs, which have {room / GIGABYTE:.0f} GB to give"
            raise UserError(f"{part} takes {words}")
