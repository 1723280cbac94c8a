"""What a scenario produced, as digests to be stored: exact where arithmetic is exact, and sums for other machines.

Tokens, versions and counts must come out the same everywhere. Floating-point numbers must be the same to the bit on the
kind of processor and with the torch version they were recorded with; elsewhere their sums are held to 1e-5.
"""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

STORED = Path(__file__).with_name("digests.json")
TOLERANCE = 1e-5  # of sums, relative to those above 1
# A bias of all keys shifts the scores of a query alike, but for slow rotations: its gradient is mostly rounding, which
# AdamW makes a whole step. So it is compared only where arithmetic is the same.
ROUNDING = "k_proj.bias"


@dataclass(slots=True)
class Numbers:
    """Arrays by name, in the order in which they were added."""

    whole: dict[str, list[np.ndarray]] = field(default_factory=dict)
    real: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def add(self, **arrays: Any) -> None:
        """Keep copies; whole numbers and flags apart from real numbers."""
        for name, values in arrays.items():
            array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
            kind = self.real if np.issubdtype(array.dtype, np.floating) else self.whole
            kind.setdefault(name, []).append(np.array(array, copy=True))

    def digest(self) -> dict[str, Any]:
        """As it is stored."""
        real = {name: np.concatenate([a.ravel() for a in arrays]) for name, arrays in self.real.items()}
        return {
            "whole": _hash(self.whole),
            "real": _hash(self.real),
            "sums": {name: [float(a.sum()), float(np.abs(a).sum())] for name, a in real.items()},
        }


def _hash(named: Mapping[str, Sequence[np.ndarray]]) -> str:
    """Over names, types, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(named):
        for array in named[name]:
            total.update(f"{name} {array.dtype.str} {array.shape}".encode())
            total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:16]


def machine() -> str:
    """On what the bits of floating-point numbers depend."""
    versions = f"torch {torch.__version__} numpy {np.__version__}"
    return f"{vendor()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {versions}"


def vendor() -> str:
    """Who made the processor: MKL has other kernels for each, whatever instructions they share."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "unknown")


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any], same_machine: bool) -> list[str]:
    """What two digests disagree on, in words; empty if nothing."""
    told = [] if found["whole"] == wanted["whole"] else ["tokens, versions or counts"]
    if same_machine:
        return told if found["real"] == wanted["real"] else [*told, "the bits of real numbers"]
    if found["sums"].keys() != wanted["sums"].keys():
        return [*told, "which real numbers there are"]
    for name, sums in ((n, s) for n, s in wanted["sums"].items() if ROUNDING not in n):
        close = np.allclose(found["sums"][name], sums, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        told += [] if close else [f"the sum of {name}"]
    return told


def stored() -> dict[str, Any]:
    """Of all scenarios, and the machine."""
    found: dict[str, Any] = json.loads(STORED.read_text())
    return found
