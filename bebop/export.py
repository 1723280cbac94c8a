"""Writes a trained part for another program, or the merged model of a LoRA run: ``python -m bebop.export``."""

import argparse
from pathlib import Path
from typing import Any

from bebop.command import Parser, check_writable, run_main, whole, writing
from bebop.config.fields import MAX_INT, from_dict
from bebop.config.job import LoraConfig, ModelConfig
from bebop.errors import UserError
from bebop.run_dir.checkpoints import MODEL, STEPS, Store
from bebop.run_dir.folder import CONFIG, IDENTITY
from bebop.run_dir.safe_parse import parse_json, parse_yaml
from bebop.systems import PARTS

EXPORTED = [name for name, part in PARTS.items() if part.export]
PART, BUILT_IN = "block", "tiny"  # defaults


def parser() -> Parser:
    """Return the command-line parser."""
    top = Parser(prog="python -m bebop.export", description=__doc__)
    top.add_argument("--out", type=Path, required=True, help="the folder to write")
    top.add_argument("--run", type=Path, help="a run with trainer.lora: its model is written, with the adapter merged")
    top.add_argument("--step", type=whole(0, MAX_INT), help="of the run's checkpoint (default: the newest)")
    top.add_argument("--part", choices=EXPORTED, help=f"block: for SGLang's DFLASH (default: {PART})")
    top.add_argument("--model", help=f"the model that the part was made for (default: {BUILT_IN})")
    top.add_argument("--file", help="the .safetensors file of the part (default: the one that comes with the model)")
    top.add_argument(
        "--mask-token",
        type=whole(0, MAX_INT),
        help="the id of MASK, which no text has (default: the first that the tokenizer does not have)",
    )
    return top


def main(arguments: list[str]) -> int:
    """Load the part or run to export, which checks it, and write it."""
    options = parser().parse_args(arguments)
    check_writable("--out", options.out)
    if options.run is not None:
        return export_run(options)
    if options.step is not None:
        raise UserError(f"--step {options.step} is not possible: it goes with --run")
    return export_part(options)


def export_part(options: argparse.Namespace) -> int:
    """Write a trained part and return the exit code."""
    refuse_folder(options.out, options.part or PART)
    from bebop.model.checkpoint import load_policy  # torch and transformers take seconds; errors should not wait
    from bebop.runtime.preflight import check_model

    name = options.part or PART
    make_export = PARTS[name].export
    assert make_export is not None, "the choices are parts that have one"
    export = make_export()
    parts = {name: options.file} if options.file else {}
    config = ModelConfig(path=options.model or BUILT_IN, device="cpu", dtype="bfloat16", check=False, parts=parts)
    check_model(config)
    policy = load_policy(config, needs=(name,))
    with writing(options.out):
        text = export(policy, policy.parts[name], options.out, options.mask_token)
    print(text, end="")
    return 0


def refuse_folder(folder: Path, part: str) -> None:
    """Raise ``UserError`` for a folder that holds another model; an exported part may be written again."""
    if not (folder / "config.json").is_file():
        return
    from bebop.systems.block.dflash import read_settings

    try:
        if (layout := PARTS[part].folder) is not None:
            layout().settings(folder)
        else:
            read_settings(folder)
    except UserError as error:
        raise UserError(f"--out={str(folder)!r} is not possible: it holds something else; {error}") from error


# ---- the merged model of a run


def export_run(options: argparse.Namespace) -> int:
    """Write a run's model with its adapter merged in, and with its head, as a Hugging Face folder; return the exit
    code.
    """
    for name in ("part", "model", "file", "mask_token"):
        if getattr(options, name) is not None:
            shown = name.replace("_", "-")
            raise UserError(f"--{shown}={getattr(options, name)} is not possible: --run writes the model of a run")
    model, lora, seed = read_run(options.run)
    folder = find_checkpoint(options.run, options.step)
    if (options.out / "config.json").is_file():
        raise UserError(f"--out={str(options.out)!r} is not possible: it holds a model: choose another folder")
    import torch  # seconds, see above

    from bebop.model.checkpoint import load_policy, save_policy
    from bebop.model.lora import merge_into
    from bebop.run_dir.identity import identity
    from bebop.runtime.preflight import check_model
    from bebop.trainer.checkpoint import load

    check_model(model, any_backbone=True)  # a run beside SGLang or vLLM may have trained any
    check_identity(options.run, identity(model, {}))
    trained = load(folder).trainer
    torch.manual_seed(seed)  # as the trainer's ranks do, so that a fresh head equals theirs
    policy = load_policy(model, any_backbone=True)
    merge_into(policy, trained["weights"], lora)
    head = trained.get("head")
    own = {} if policy.mtp is None else dict(policy.mtp.named_parameters())
    if head is not None and own and head["weights"].keys() == own.keys():  # and not another drafter's
        policy.load({f"mtp.{name}": tensor for name, tensor in head["weights"].items()})
    with writing(options.out):
        save_policy(policy, options.out)
    print(f"{options.out}: the model of {folder.name}, with its adapter of rank {lora.rank} merged")
    return 0


def read_run(run: Path) -> tuple[ModelConfig, LoraConfig, int]:
    """Return model, adapter and seed of a run.

    Raises ``UserError`` for a folder without a run, and for a run that trained all weights.
    """
    file, refused = run / CONFIG, f"--run={str(run)!r} is not possible"
    try:
        read: Any = parse_yaml(file.read_text(encoding="utf-8"))
        given = dict(read["model"]) | {"device": "cpu", "check": False, "parts": {}}
        lora, seed = dict(read["trainer"].get("lora") or {}), int(read["runtime"]["seed"])
    except OSError as error:
        raise UserError(f"{refused}: {file} cannot be read ({error.strerror}): give the folder of a run") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{refused}: {file} is no configuration of a run") from None
    adapter = from_dict(LoraConfig, lora, "trainer.lora.")
    if not adapter.rank:
        raise UserError(f"{refused}: it trained all weights, without trainer.lora: its model is {run / MODEL}")
    return from_dict(ModelConfig, given, "model."), adapter, seed


def find_checkpoint(run: Path, step: int | None) -> Path:
    """Return the run's newest intact checkpoint, or the last one of a step."""
    store = Store(run, STEPS)
    if step is None:
        newest = store.newest_sound()
        if newest is None:
            raise UserError(f"--run={str(run)!r} is not possible: it holds no finished checkpoint")
        return newest
    saved = {store.step(path): path for path in store.all()}
    if step not in saved:
        there = ", ".join(map(str, sorted(saved))) or "none"
        raise UserError(f"--step {step} is not possible: there are checkpoints of steps {there}")
    return saved[step]


def check_identity(run: Path, now: dict[str, str]) -> None:
    """Raise ``UserError`` if the run's model differs from the model that its settings name now."""
    try:
        before = dict(parse_json((run / IDENTITY).read_bytes()))
    except (OSError, ValueError, TypeError):
        raise UserError(f"{run / IDENTITY} cannot be read, so it cannot be told which model the run adapted") from None
    for name, mark in now.items():
        if before.get(name, mark) != mark:
            raise UserError(f"--run={str(run)!r} is not possible: {name} is not the one that the run began with")


if __name__ == "__main__":
    run_main(main)
