"""Train the built-in model from scratch: ``python -m recipes.tiny [--out DIR]``, about 20 minutes on two cores."""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from bebop.command import Parser, check_writable, run_main, whole
from bebop.config.fields import MAX_INT, MAX_PROCESSES
from bebop.config.job import ModelConfig
from bebop.model.checkpoint import load_policy, save_policy
from recipes.tiny.sft import train_backbone, train_head


def main(arguments: list[str]) -> None:
    """Train the backbone, then the head, and write the checkpoint in bfloat16."""
    parser = Parser(prog="python -m recipes.tiny", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"), help="where to write (default: runs/tiny)")
    parser.add_argument("--steps", type=whole(1), default=1600, help="steps of the backbone (default: 1600)")
    parser.add_argument("--head-steps", type=whole(1), default=600, help="steps of the MTP head (default: 600)")
    parser.add_argument("--threads", type=whole(1, MAX_PROCESSES), default=2, help="CPU threads (default: 2)")
    parser.add_argument("--seed", type=whole(0, MAX_INT), default=0)
    options = parser.parse_args(arguments)
    check_writable("--out", options.out)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        train_backbone(Path(scratch), steps=options.steps, seed=options.seed)
        policy = load_policy(ModelConfig(path=scratch, device="cpu", init_mtp=True))
    torch.manual_seed(options.seed)
    train_head(policy, steps=options.head_steps)
    save_policy(replace(policy, stored={}), options.out, torch.bfloat16)


if __name__ == "__main__":
    run_main(main)
