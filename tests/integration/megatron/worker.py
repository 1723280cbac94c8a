"""What each of the two processes of ``test_splits`` and ``test_experts`` does; ``rank`` starts it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from bebop.megatron_job.checkpoint import load_head, save_head
from bebop.megatron_job.convert import convert
from bebop.megatron_job.parallel import ParallelConfig, Place, here, prepare_cpu, split
from bebop.megatron_job.weights import router_biases
from bebop.trainer.objectives import OBJECTIVES
from tests.integration.megatron.builders import rows, run, trainer
from tests.integration.megatron.policy import context_step, cotrainer, scheduled, wrapped

SPLITS = {
    "tp2": ParallelConfig(tensor=2), "pp2": ParallelConfig(pipeline=2), "dp2": ParallelConfig(),
    "cp2": ParallelConfig(context=2),
}  # fmt: skip
EXPERT_SPLITS = {
    "ep2": ParallelConfig(expert=2), "tp2": ParallelConfig(tensor=2), "tp2 ep2": ParallelConfig(tensor=2, expert=2),
    "cp2 ep2": ParallelConfig(context=2, expert=2), "pp2": ParallelConfig(pipeline=2),
}  # fmt: skip
EXPERT_STEPS = 6


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
            if name == "pp2":  # rank 0, which writes numbers, has no part of the head
                save_head(folder / "staged", training)
    with split(SPLITS["dp2"]) as place:
        training = trainer(checkpoint, SPLITS["dp2"], place, objective="tv")
        load_head(folder / "staged", training)
        found["steps"] = {int(state["step"]) for state in training.optimizer.state.values()}
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


def splits(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Every split, one after the other, in groups of their own."""
    found: dict[str, Any] = {name: trained(checkpoint, parallel) for name, parallel in SPLITS.items()}
    found["first"] = first_losses(checkpoint)
    found["broken"] = broken(checkpoint)
    found["beside"] = beside(checkpoint)
    found["contexts"] = contexts(checkpoint)
    found["resumed"] = resumed(checkpoint, folder)
    converted(checkpoint, folder)
    return found


def steps_of(training: Any, count: int = EXPERT_STEPS, start: int = 0) -> dict[str, Any]:
    """Some steps, and the weights after them."""
    return {**run(training, count, start), "weights": training.weights()}


def experts(checkpoints: Path, folder: Path) -> dict[str, Any]:
    """Heads with experts over every split; checkpoints of one split read by another; what has to be noticed."""
    found: dict[str, Any] = {}
    for family in ("qwen3_moe", "glm4_moe"):
        for name, parallel in EXPERT_SPLITS.items():
            with split(parallel) as place:
                training = trainer(checkpoints / family, parallel, place, objective="e2e_tv")
                found[family, name] = steps_of(training)
                if name == "tp2 ep2":
                    save_head(folder / family, training)
    ep2 = EXPERT_SPLITS["ep2"]
    with split(ep2) as place:
        source = checkpoints / "glm4_moe"
        training = trainer(source, ep2, place, objective="e2e_tv")
        load_head(folder / "glm4_moe", training)
        found["read by ep2"] = training.weights()
        found["not stopped"] = [steps_of(training, 2, EXPERT_STEPS), steps_of(training, 2, EXPERT_STEPS + 2)][1]
        training = trainer(source, ep2, place, objective="e2e_tv")
        load_head(folder / "glm4_moe", training)
        run(training, 2, EXPERT_STEPS)
        save_head(folder / "stopped", training)
        training = trainer(source, ep2, place, objective="e2e_tv")
        load_head(folder / "stopped", training)
        found["stopped"] = steps_of(training, 2, EXPERT_STEPS + 2)
        found["broken"] = broken_experts(source, place)
    paths = {"model": str(checkpoints / "glm4_moe"), "out": str(folder / "megatron")}
    with split(EXPERT_SPLITS["tp2 ep2"]) as place:
        convert("to-megatron", paths, EXPERT_SPLITS["tp2 ep2"], place)
    return found


def broken_experts(source: Path, place: Place) -> dict[str, Any]:
    """What the comparison has to catch: the other rank's experts, and a router without its bias."""
    ep2, found = EXPERT_SPLITS["ep2"], {}
    turned = dataclasses.replace(place, expert=1 - place.expert)
    found["experts of the other rank"] = run(trainer(source, ep2, turned, objective="e2e_tv"), 2)
    training = trainer(source, ep2, place, objective="e2e_tv")
    for _, bias in router_biases(training.backend.model.mtp):
        bias.zero_()
    found["bias left out"] = run(training, 2)
    return found


def main(rank: int, world: int, folder: Path, checkpoint: Path, what: Callable[[Path, Path], dict[str, Any]]) -> None:
    """Run ``what`` in one of two processes, and store what it found."""
    torch.set_num_threads(1)
    prepare_cpu()
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world)
    torch.save(what(checkpoint, folder), folder / f"rank{rank}.pt")
    dist.destroy_process_group()
