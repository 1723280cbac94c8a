"""What each of the two processes of ``test_splits`` does; ``rank`` starts it."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from bebop.megatron_job.checkpoint import load_head, save_head
from bebop.megatron_job.convert import convert
from bebop.megatron_job.parallel import ParallelConfig, here, prepare_cpu, split
from bebop.trainer.objectives import OBJECTIVES
from tests.integration.megatron.builders import rows, run, trainer
from tests.integration.megatron.policy import context_step, cotrainer, scheduled, wrapped

SPLITS = {"tp2": ParallelConfig(tensor=2), "pp2": ParallelConfig(pipeline=2), "dp2": ParallelConfig()}


def trained(checkpoint: Path, split_over: ParallelConfig) -> dict[str, Any]:
    """Thirty steps with each of two objectives; the weights after them."""
    found: dict[str, Any] = {}
    for objective in ("tv", "e2e_tv"):
        with split(split_over) as place:
            training = trainer(checkpoint, split_over, place, objective=objective)
            found[objective] = {**run(training), "weights": training.weights()}
            found[objective]["overlaps"] = training.backend.overlaps(rows(99), 3)
    return found


def first_losses(checkpoint: Path) -> dict[str, float]:
    """The first loss of every objective, with the vocabulary in two parts."""
    found = {}
    with split(SPLITS["tp2"]) as place:
        for objective in OBJECTIVES:
            found[objective] = trainer(checkpoint, SPLITS["tp2"], place, objective=objective).update(rows(0))[
                "head/loss"
            ]
    return found


def broken(checkpoint: Path) -> dict[str, Any]:
    """What the comparison has to catch: one sum over ranks left out at a time."""
    found = {}
    with split(SPLITS["tp2"]) as place:
        training = trainer(checkpoint, SPLITS["tp2"], place, objective="tv")
        training.backend.sampling = dataclasses.replace(training.backend.sampling, group=None)
        found["loss of one part of the vocabulary"] = run(training, 3)
        training = trainer(checkpoint, SPLITS["tp2"], place, objective="tv")
        training.backend.split = dict.fromkeys(training.backend.split, False)
        found["norm of one rank's parts"] = run(training, 3)
    with split(SPLITS["dp2"]) as place:
        training = trainer(checkpoint, SPLITS["dp2"], place, objective="tv")
        reduce_alone(training.backend)
        found["gradient of one rank's rows"] = run(training, 3)
    return found


def reduce_alone(backend: Any) -> None:
    """Gradients are summed over the tensor ranks, of which there is one, in the place of the data ranks."""
    place, reduce = backend.place, backend.reduce

    def reduced(scale: float) -> Any:
        backend.place = dataclasses.replace(place, data_group=place.tensor_group)
        norm = reduce(scale)
        backend.place = place
        return norm

    backend.reduce = reduced


def resumed(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Three steps split over tensor ranks, three more over pipeline stages from the checkpoint, and data ranks."""
    with split(SPLITS["tp2"]) as place:
        training = trainer(checkpoint, SPLITS["tp2"], place, objective="tv")
        run(training, 3)
        save_head(folder / "head", training)
    found = {}
    for name in ("pp2", "dp2"):
        with split(SPLITS[name]) as place:
            training = trainer(checkpoint, SPLITS[name], place, objective="tv")
            load_head(folder / "head", training)
            found[name] = {**run(training, 3, start=3), "version": training.version, "weights": training.weights()}
    return found


def converted(checkpoint: Path, folder: Path) -> None:
    """Into megatron-core's format by tensor ranks, out of it by pipeline stages."""
    paths = {"model": str(checkpoint), "out": str(folder / "megatron")}
    with split(SPLITS["tp2"]) as place:
        convert("to-megatron", paths, SPLITS["tp2"], place)
    back = {"model": str(checkpoint), "source": paths["out"], "out": str(folder / "back")}
    with split(SPLITS["pp2"]) as place:
        convert("to-huggingface", back, SPLITS["pp2"], place)


def beside(checkpoint: Path) -> dict[str, Any]:
    """A head beside a policy under Megatron's schedules; the policy stands still, and one process can say the same."""
    found: dict[str, Any] = {}
    for name, scattered in (("pp2", False), ("dp2", False), ("tp2", False), ("tp2", True)):
        parallel = SPLITS[name]
        with split(parallel) as place:
            model, plain = (wrapped(checkpoint, place, parallel, scattered=scattered) for _ in range(2))
            head, same, numbers = cotrainer(model), True, []
            idle = cotrainer(plain)
            for step in range(3):
                some = rows(step, 8)
                mine = some[place.data :: place.datas]
                parts = [mine[:2], mine[2:4]] if place.datas == 2 else [some[:2], some[2:4], some[4:6], some[6:]]
                a, b = scheduled(model, parts), scheduled(plain, parts, mask=False)
                same = same and a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
                numbers.append(head.step())
            key = f"{name}, scattered" if scattered else name
            found[key] = {"same": same, "numbers": numbers, "idle": idle.step()}
            found[key]["largest"] = max(float(g.abs().max()) for g in a.values())
    return found


def contexts(checkpoint: Path) -> dict[str, dict[str, float]]:
    """A head's step on parts of each row, side by side and end to end."""
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    place = here()
    found = {name: context_step(checkpoint, place, packed=name == "packed") for name in ("side by side", "packed")}
    parallel_state.destroy_model_parallel()
    return found


def main(rank: int, world: int, checkpoint: Path, folder: Path) -> None:
    """Every split, one after the other, in groups of their own."""
    torch.set_num_threads(1)
    prepare_cpu()
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world)
    found: dict[str, Any] = {name: trained(checkpoint, parallel) for name, parallel in SPLITS.items()}
    found["first"] = first_losses(checkpoint)
    found["broken"] = broken(checkpoint)
    found["beside"] = beside(checkpoint)
    found["contexts"] = contexts(checkpoint)
    found["resumed"] = resumed(checkpoint, folder)
    torch.save(found, folder / f"rank{rank}.pt")
    converted(checkpoint, folder)
    dist.destroy_process_group()
