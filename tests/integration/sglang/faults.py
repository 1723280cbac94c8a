"""Faults in SGLang's own verification, planted through its hook registry: what a certificate has to find.

A plugin of its own, beside Bebop's: ``plant`` gives the environment in which SGLang loads it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

KERNEL = "sglang.kernels.ops.speculative.verify_sampling.chain_speculative_sampling_triton"
FAULT = "BEBOP_TEST_FAULT"
ROOT = Path(__file__).resolve().parents[3]


def plant(folder: Path, name: str, share: float) -> dict[str, str]:
    """Variables for a server with a fault of ``FAULTS`` in a share of its rows and cycles."""
    info = folder / "bebop_faults-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bebop-faults\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nfaults = {__name__}:register\n")
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), FAULT: f"{name}:{share}"}


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    name, share = os.environ[FAULT].split(":")
    chances = torch.Generator().manual_seed(7)

    def faulty(original: Callable[..., Any], **given: Any) -> Any:
        wrong = torch.rand(len(given["candidates"]), generator=chances) < float(share)
        return FAULTS[name](original, given, wrong, chances)

    HookRegistry.register(KERNEL, faulty, HookType.AROUND)


def bonus(original: Callable[..., Any], given: dict[str, Any], wrong: torch.Tensor, _: torch.Generator) -> Any:
    """The token after all drafts comes from the row before its own."""
    target = given["target_probs"].clone()
    target[wrong, -1] = target[wrong, -2]
    return original(**{**given, "target_probs": target})


def recovered(original: Callable[..., Any], given: dict[str, Any], wrong: torch.Tensor, own: torch.Generator) -> Any:
    """The token after a rejection is drawn from p, not from what p has beyond q."""
    result = original(**given)
    counts = given["accept_token_num"].long()
    for row in (wrong & (counts < given["candidates"].shape[1] - 1)).nonzero()[:, 0].tolist():
        place = int(given["accept_index"][row, counts[row]])
        drawn = torch.multinomial(given["target_probs"][row, counts[row]], 1, generator=own)
        given["predicts"][place] = drawn[0].to(given["predicts"].dtype)
    return result


FAULTS = {"bonus": bonus, "recovered": recovered}
