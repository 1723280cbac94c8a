"""Terminal output at the start and at the end of a run, at most eight lines each.

The start names the model, the task, the expected memory and where to watch the run. The end repeats the report: its
verdict, advice and command come from ``bebop.report.verdict``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bebop.command import shown_command, shown_path
from bebop.config.adapt import AdaptConfig
from bebop.config.job import JobConfig, ModelConfig
from bebop.model.checkpoint import draft_config, empty_model, find_device, mtp_layout, read_config, read_draft, resolve
from bebop.model.lora import adapter_size
from bebop.model.memory import engine_fraction, job_memory, parameters
from bebop.report.verdict import Said, ended
from bebop.rollout.engines import engine_module
from bebop.run_dir.checkpoints import holds_adapter, newest_model
from bebop.systems import SYSTEMS
from bebop.trajectory_db.reader import NAME

if TYPE_CHECKING:
    from bebop.runtime.session import Dashboard  # imports Ray, which an adaptation does without


def about_run(config: JobConfig, defaults: Mapping[str, Any], dashboard: "Dashboard | None") -> list[str]:
    """Return the lines below the run folder at the start of a run.

    Args:
        config: configuration of the run.
        defaults: settings that follow from the model.
        dashboard: Ray's dashboard; None if it was not started.
    """
    trainer, here = config.trainer, config.runtime.address is None
    given = f"{trainer.groups_per_step} prompts x {trainer.group_size} completions of {config.task.name}"
    named = [f"{name}={value}" for name, value in defaults.items()]
    draft = SYSTEMS[config.decoding.system].separate
    rows = [
        ("model", about_model(config.model, here)),
        ("drafts", about_model(draft_config(config.model), here) if draft else ""),
        ("training", f"{trainer.steps} steps of {given}, learning rate {trainer.lr:g}{_about_adapter(config)}"),
        ("settings", f"{', '.join(named)} (follow from the model)" if named else ""),
        ("memory", expected_memory(config) if here else ""),
        ("Ray", f"{', '.join(actors(config))}; {_about_dashboard(dashboard)}"),
    ]
    if config.monitor.trace != "off":
        rows.append(("viewer", shown_command("view", str(shown_path(Path(str(config.runtime.dir)))))))
    return _aligned(rows)


def about_adaptation(config: AdaptConfig) -> list[str]:
    """Return the lines below the run folder at the start of an adaptation."""
    rows = [("model", about_model(config.model))]
    if config.part == "head":  # the training of a part has options of its own
        what = f"{config.train.steps} steps of {config.head.objective} on {config.data.sequences or 'all'} completions"
        rows.append(("training", f"{what}, learning rate {config.head.lr:g}"))
    return _aligned(rows)


def about_model(config: ModelConfig, here: bool = True) -> str:
    """Return size, type and location of a model; ``here``: it runs on this machine, whose devices are known."""
    folder, settings = resolve(config.path), read_config(config)
    layers = settings.get_text_config().num_hidden_layers
    head = " and an MTP head" if config.init_mtp or mtp_layout(folder, layers) is not None else ""
    count = parameters(sorted(folder.glob("*.safetensors")))
    where = find_device(config) if here else config.device
    return f"{config.path}, {_size(count)} parameters, {layers} layers{head}, {config.dtype} on {where}"


def expected_memory(config: JobConfig) -> str:
    """Return the expected memory of a job on this machine, with its parts, as text."""
    count = parameters(sorted(resolve(config.model.path).glob("*.safetensors")))
    embedded = engine_module(config).EMBEDDED
    adapter, draft = _adapter(config), None
    if SYSTEMS[config.decoding.system].separate:
        draft = (read_draft(config.model), parameters(sorted(resolve(str(config.model.draft)).glob("*.safetensors"))))
    settings, device = read_config(config.model), find_device(config.model)
    return job_memory(config, settings, count, device, embedded, adapter, draft)


def memory_beside_trainer(config: JobConfig) -> tuple[float, str]:
    """Return the memory fraction for an engine that shares the GPU with the trainer, and the line that reports it."""
    count = parameters(sorted(resolve(config.model.path).glob("*.safetensors")))
    settings, device = read_config(config.model), find_device(config.model)
    fraction = engine_fraction(config, settings, count, device, _adapter(config))
    return (
        fraction,
        f"rollout.{config.rollout.engine}.memory_fraction={fraction}: the trainer needs the rest of the GPU",
    )


def _adapter(config: JobConfig) -> int:
    """Return the number of parameters of the adapter that the job trains; 0 without an adapter."""
    lora = config.trainer.lora
    return adapter_size(empty_model(resolve(config.model.path)), lora) if lora.rank else 0


def _about_adapter(config: JobConfig) -> str:
    count = _adapter(config)
    return f", LoRA of rank {config.trainer.lora.rank} ({_size(count)} parameters)" if count else ""


def actors(config: JobConfig) -> list[str]:
    """Return the names of a job's processes in Ray's dashboard and logs, as one range per kind."""
    workers, ranks = config.rollout.workers, config.trainer.ranks
    return [
        "Trainer" if ranks == 1 else f"Trainer(0) to Trainer({ranks - 1})",
        "RolloutWorker(0)" if workers == 1 else f"RolloutWorker(0) to RolloutWorker({workers - 1})",
    ]


def _about_dashboard(dashboard: "Dashboard | None") -> str:
    if dashboard is None:
        return "no dashboard (runtime.dashboard=true)"
    return f"dashboard {dashboard.url}" + (" (its token: ray get-auth-token)" if dashboard.token else "")


def ended_run(folder: Path, said: Said | None, report: Path | None, again: str = "") -> list[str]:
    """Return the lines at the end of a run.

    Args:
        folder: folder of the run.
        said: verdict and advice; None if no step was finished.
        report: path of the report page; None if none was written.
        again: the command that resumes the run; empty unless it was interrupted.
    """
    model = newest_model(folder)
    paths = {"model": folder / model if model else None, "report": report}
    viewer = shown_command("view", str(shown_path(folder))) if (folder / NAME).is_file() else ""
    adapter = model is not None and holds_adapter(folder / model)
    merging = shown_command("export", "--run", str(shown_path(folder)), "--out", "DIR") if adapter else ""
    if said is None or again:  # the advice is for a finished run
        said = Said(verdict=said.verdict if said else "", advice="")
    written = {name: path for name, path in paths.items() if path is not None}
    commands = {"the model with its adapter": merging, "viewer": viewer, "interrupted; go on with": again}
    return ended(said, written, commands)


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return the rows with a text as aligned lines."""
    return [f"  {name:10} {text}" for name, text in rows if text]


def _size(count: int) -> str:
    """Return a number of parameters as text, for instance 135M or 7.6B."""
    if count >= 10**9:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.0f}M" if count >= 10**7 else f"{count / 1e6:.1f}M"
