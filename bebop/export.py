"""Writes a trained part in the format of another program: ``python -m bebop.export --out DIR``."""

from pathlib import Path

from bebop.command import Parser, check_writable, run_main, whole, writing
from bebop.config.fields import MAX_INT
from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.systems import PARTS

EXPORTED = [name for name, part in PARTS.items() if part.export]


def parser() -> Parser:
    """Return the parser of the command line."""
    top = Parser(prog="python -m bebop.export", description=__doc__)
    top.add_argument("--out", type=Path, required=True, help="the folder to write")
    top.add_argument("--part", default="block", choices=EXPORTED, help="block: for SGLang's DFLASH (default: block)")
    top.add_argument("--model", default="tiny", help="the model that it was made for (default: tiny)")
    top.add_argument("--file", help="the .safetensors file of the part (default: the one that comes with the model)")
    top.add_argument(
        "--mask-token",
        type=whole(0, MAX_INT),
        help="the id of MASK, which no text has (default: the first that the tokenizer does not have)",
    )
    return top


def main(arguments: list[str]) -> int:
    """Load the part with its model, which checks it, and write it."""
    options = parser().parse_args(arguments)
    check_writable("--out", options.out)
    refuse_folder(options.out)
    from bebop.model.checkpoint import load_policy  # torch and transformers take seconds; errors should not wait
    from bebop.runtime.preflight import check_model

    make_export = PARTS[options.part].export
    assert make_export is not None, "the choices are parts that have one"
    export = make_export()
    parts = {options.part: options.file} if options.file else {}
    config = ModelConfig(path=options.model, device="cpu", dtype="bfloat16", check=False, parts=parts)
    check_model(config)
    policy = load_policy(config, needs=(options.part,))
    with writing(options.out):
        text = export(policy, policy.parts[options.part], options.out, options.mask_token)
    print(text, end="")
    return 0


def refuse_folder(folder: Path) -> None:
    """Raise ``UserError`` for a folder that holds another model; an exported part may be written again."""
    if not (folder / "config.json").is_file():
        return
    from bebop.systems.block.dflash import read_settings

    try:
        read_settings(folder)
    except UserError as error:
        raise UserError(f"--out={str(folder)!r} is not possible: it holds something else; {error}") from error


if __name__ == "__main__":
    run_main(main)
