"""Peak rates of machines: floating-point operations, bytes per second, memory, links. One table for all rooflines.

A card's numbers come from its data sheet until ``python -m bebop.bench.gpu`` has measured one of its kind. Then the
results in ``benchmarks/gpu/<card>/0_card.json`` replace operations and bandwidth (``measured``).
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

MEASURED = Path(__file__).parent / "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The peaks of a device, in units of one second."""

    flops: float  # bf16 on a GPU, float32 on a CPU; dense
    bandwidth: float  # bytes, of its memory
    memory: float  # bytes
    nvlink: float = 0.0  # bytes, each way, within a machine
    network: float = 0.0  # bytes, each way, between machines
    host: float = 0.0  # bytes, from its memory to the machine's
    source: str


# One 400 Gb/s InfiniBand port per GPU, as in a DGX H100 or H200. A link's data sheet counts both ways together.
PEAKS = {
    "h100": Peaks(
        flops=989e12, bandwidth=3.35e12, memory=80e9, nvlink=450e9, network=50e9, host=64e9,
        source="NVIDIA, H100 Tensor Core GPU data sheet, SXM: 1,979 TFLOP/s bf16 with sparsity, half of it dense",
    ),
    "gh200": Peaks(
        flops=989e12, bandwidth=4.0e12, memory=96e9, nvlink=450e9, network=50e9, host=450e9,
        source="NVIDIA, GH200 Grace Hopper Superchip data sheet, with 96 GB HBM3",
    ),
    "h200": Peaks(
        flops=989e12, bandwidth=4.8e12, memory=141e9, nvlink=450e9, network=50e9, host=64e9,
        source="NVIDIA, H200 Tensor Core GPU data sheet, SXM: 1,979 TFLOP/s bf16 with sparsity, half of it dense",
    ),
    "h20": Peaks(
        flops=148e12, bandwidth=4.0e12, memory=96e9, nvlink=450e9, network=50e9, host=64e9,
        source="H20, 148 TFLOP/s bf16 by verl's documentation of MTP; NVIDIA publishes no data sheet",
    ),
    "gb200": Peaks(
        flops=2500e12, bandwidth=8.0e12, memory=186e9, nvlink=900e9, network=50e9, host=450e9,
        source="NVIDIA, GB200 NVL72 data sheet, a GPU: 5,000 TFLOP/s bf16 with sparsity, half of it dense",
    ),
    "b200": Peaks(
        flops=2250e12, bandwidth=7.7e12, memory=180e9, nvlink=900e9, network=50e9, host=64e9,
        source="NVIDIA, HGX B200 data sheet, a GPU: 4,500 TFLOP/s bf16 with sparsity, half of it dense",
    ),
    "a100": Peaks(
        flops=312e12, bandwidth=2.039e12, memory=80e9, nvlink=300e9, network=25e9, host=32e9,
        source="NVIDIA, A100 Tensor Core GPU data sheet, SXM with 80 GB",
    ),
    "l40s": Peaks(
        flops=362e12, bandwidth=864e9, memory=48e9, nvlink=32e9, network=25e9, host=32e9,
        source="NVIDIA, L40S data sheet: 733 TFLOP/s bf16 with sparsity, half of it dense; PCIe between GPUs",
    ),
    "rtx4090": Peaks(
        flops=165e12, bandwidth=1.008e12, memory=24e9, nvlink=32e9, network=12.5e9, host=32e9,
        source="NVIDIA, Ada architecture white paper, RTX 4090: bf16 with fp32 sums; PCIe between GPUs",
    ),
    "cpu": Peaks(
        flops=199e9, bandwidth=35e9, memory=25e9,
        source="measured: cpu/bound.json, one thread of an AMD EPYC: SmolLM2 at batch 32, and its weights read",
    ),
}  # fmt: skip


def measured(name: str, folder: Path = MEASURED) -> Peaks:
    """Return a row of ``PEAKS``, with the operations and the bandwidth of such a card if one was measured.

    Raises:
        KeyError: There is no such row.
    """
    peaks, file = PEAKS[name], folder / name / "0_card.json"
    if not file.is_file():
        return peaks
    content = json.loads(file.read_text())
    found = {row["what"]: row["value"] for row in content["rows"] if row.get("steady", True)}
    known = {"flops": found.get("bf16 TFLOP/s", 0) * 1e12, "bandwidth": found.get("copy GB/s", 0) * 1e9}
    source = f"measured: {file.relative_to(folder)}, commit {content['place']['commit']}"
    return dataclasses.replace(peaks, source=source, **{field: value for field, value in known.items() if value})
