"""Two ranks over gloo (FSDP2) learn what one rank learns: the policy with its head, and a head by itself."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.metrics.metrics import values
from bebop.model.checkpoint import save_policy
from bebop.trainer.checkpoint import load
from bebop.trainer.policy import PolicyTrainer
from tests.trainer.builders import batch, job, policy, weights_of
from tests.trainer.one_rank import steady, train, train_head
from tests.trainer.test_heads import distance as apart
from tests.trainer.test_heads import rows
from tests.trainer.test_heads import trainer as head_trainer

pytestmark = pytest.mark.slow  # two processes, and one beside them
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("ranks")
    save_policy(policy(), made / "model")
    save_policy(policy(dtype=torch.bfloat16), made / "narrow")
    return made


def processes(of: str, folder: Path) -> list[dict[str, Any]]:
    """What each of two rank processes has to show."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    commands = [[sys.executable, "-m", "tests.trainer.one_rank", of, str(rank), "2", str(folder)] for rank in range(2)]
    ranks = [subprocess.Popen(one, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) for one in commands]
    for rank in ranks:
        _, errors = rank.communicate(timeout=240)
        assert rank.returncode == 0, errors[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return processes("policy", folder)


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    return train(0, 1, folder)


def distance(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert list(ours) == list(wanted)
    return float(
        np.max([float((ours[name].float() - wanted[name].float()).abs().max()) for name in wanted])
    )  # NaN stays


def test_weights_after_two_updates_equal_those_of_one_rank(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    assert distance(two[0]["second"], one["second"]) < 1e-5
    start = {name: t for name, t in weights_of(policy()).items() if name in one["second"]}
    assert distance(start, one["second"]) > 1e-2, "the updates move the weights by far more than the tolerance"
    assert two[1]["second"] == {}


def test_resume_on_two_ranks_goes_on_as_one_rank_does(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    assert distance(two[0]["third"], one["third"]) < 1e-5
    assert distance(two[0]["third"], {**one["third"], **one["second"]}) > 1e-3


def test_tied_embeddings_are_sharded_once(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    assert "backbone.lm_head.weight" not in two[0]["tied"]["minibatch"]
    start = weights_of(policy(tied=True))
    for sync, wanted in one["tied"].items():
        assert distance(two[0]["tied"][sync], wanted) < 1e-5, sync
        assert distance({name: start[name] for name in wanted}, wanted) > 1e-3


@pytest.mark.parametrize("replay", ["False", "True"])
def test_a_mixture_of_experts_learns_on_two_ranks_what_it_learns_on_one(
    two: list[dict[str, Any]], one: dict[str, Any], replay: str
) -> None:
    wanted = one["mixture"][replay]
    assert distance(two[0]["mixture"][replay]["weights"], wanted["weights"]) < 1e-5
    assert distance(one["mixture"]["True"]["weights"], one["mixture"]["False"]["weights"]) > 1e-3, "replay counts"
    for rank in two:
        for ours, theirs in zip(rank["mixture"][replay]["metrics"], wanted["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=2e-5)
    assert ("train/routing_agreement" in wanted["metrics"][0]) == (replay == "True")


def test_the_balance_of_experts_is_of_the_tokens_of_all_ranks(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """A mean over micro-batches, which two ranks cut otherwise: near that of one rank, and the same on both."""
    assert two[0]["mixture"]["balance"] == two[1]["mixture"]["balance"]
    assert two[0]["mixture"]["balance"] == pytest.approx(one["mixture"]["balance"], rel=0.05)


def test_an_update_in_bfloat16_is_near_one_in_fp32_on_one_rank_and_on_two(
    two: list[dict[str, Any]], one: dict[str, Any]
) -> None:
    """One rank computes under autocast; two gather bfloat16 and sum up in fp32, master weights are fp32 either way."""
    exact = steady(PolicyTrainer(policy(), job(algorithm={"kl_coefficient": 0.1})))
    wanted, start = values(exact.update(batch(seed=1))), policy().weights()

    def change(weights: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        before = (start[name].detach().to(dtype).float() for name in weights)
        return torch.cat([(w.detach() - b).flatten() for w, b in zip(weights.values(), before, strict=True)])

    right = change(exact.policy.weights(), torch.float32)
    for found in (one, two[0]):
        assert all(t.dtype == torch.float32 for t in found["mixed"].values())
        assert torch.cosine_similarity(change(found["mixed"], torch.bfloat16), right, dim=0) > 0.97
        for name in ("train/grad_norm", "policy/entropy"):
            assert found["mixed_metrics"][name] == pytest.approx(wanted[name], rel=0.02), name


def test_what_is_loaded_whole_is_converted_to_fp32_after_the_split(two: list[dict[str, Any]]) -> None:
    """No rank needs the memory of a whole model in fp32, and the rows are those that a rank reads by itself."""
    for rank in two:
        whole, own_rows = rank["loaded"]
        assert whole["types"] == ["torch.bfloat16"] * 2
        assert distance(whole["weights"], own_rows["weights"]) == 0
        assert all(t.dtype == torch.float32 for t in whole["weights"].values())


def test_metrics_are_those_of_one_rank_on_every_rank(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    # The second batch, too, is of the first weights, which each rank has kept its part of.
    # Rounding alone, of which a processor may have none; NaN where nothing is held against anything.
    assert all(0 <= metrics["train/ratio_error_max"] < 1e-4 for metrics in one["metrics"])
    assert one["metrics"][1]["rollout/logprob_diff"] > 0.05
    for rank in two:
        for ours, wanted in zip(rank["metrics"], one["metrics"], strict=True):
            assert ours == pytest.approx(wanted, abs=2e-5)


def test_ranks_share_the_logprobs_of_traced_answers(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    wanted, ours = one["logprobs"], [rank["logprobs"] for rank in two]
    assert sorted(wanted) == list(range(0, 12, 2)) == sorted([*ours[0], *ours[1]]) and ours[0] and ours[1]
    for place, logp in (ours[0] | ours[1]).items():
        assert logp.shape == wanted[place].shape and float((logp - wanted[place]).abs().max()) < 1e-5


def test_a_head_trained_beside_the_policy_is_that_of_one_rank(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    names = [name for name in one["head"] if name.startswith("mtp.")]
    assert distance(two[0]["head"], one["head"]) < 1e-5
    start = weights_of(policy())
    assert max(float((one["head"][name] - start[name]).abs().max()) for name in names) > 1e-4
    for rank in two:
        for ours, wanted in zip(rank["head_metrics"], one["head_metrics"], strict=True):
            assert ours == pytest.approx(wanted, abs=2e-5)
        assert distance(rank["moments"], one["moments"]) < 1e-5
    assert two[0]["mark"] == two[1]["mark"], "every rank has the same head, to the bit"


def test_every_rank_reads_the_bank_as_one_does(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    for rank in two:
        for ours, wanted in zip(rank["bank"], one["bank"], strict=True):
            assert ours.shape == wanted.shape and float((ours - wanted).abs().max()) < 1e-5


def test_the_certificate_of_two_ranks_is_that_of_one(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """Rank 0 has put the ranks' shares in order; answers are random here, so that all that is said is "no"."""
    assert two[1]["certified"] == [None] * 3
    for ours, wanted in zip(two[0]["certified"], one["certified"], strict=True):
        assert ours["tokens"] == wanted["tokens"] > 0 and ours["cause"] == wanted["cause"] != ""
        assert ours["log_e"] == pytest.approx(wanted["log_e"], rel=1e-3) and wanted["log_e"] > 20


def test_a_checkpoint_of_two_ranks_is_one_for_one_rank(folder: Path, two: list[dict[str, Any]]) -> None:
    state = load(folder / "of-2" / "step_000002").trainer
    assert distance(state["weights"], two[0]["second"]) == 0
    algorithm = {"minibatches": 2, "kl_coefficient": 0.1, "entropy_coefficient": 0.01}
    trainer = steady(PolicyTrainer(policy(), job(algorithm=algorithm)))
    trainer.load_state_dict(state)
    trainer.update(batch(seed=3))
    wanted = {name: t for name, t in two[0]["third"].items() if not name.startswith("mtp.")}
    assert distance(trainer.weights(), wanted) < 1e-5


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 2e-3)])
def test_an_adapter_on_two_ranks_is_that_of_one(
    dtype: str, bound: float, two: list[dict[str, Any]], one: dict[str, Any]
) -> None:
    ours, wanted = two[0][f"lora_{dtype}"], one[f"lora_{dtype}"]
    assert distance(ours["state"]["weights"], wanted["state"]["weights"]) < bound
    products = {name: t for name, t in wanted["state"]["weights"].items() if ".lora_B." in name}
    assert distance(products, {name: torch.zeros_like(t) for name, t in products.items()}) > 3 * bound, (
        "they began as 0"
    )
    # In bfloat16 a weight near 1 that is rounded to the other side is 2^-8 away.
    assert distance(ours["weights"], wanted["weights"]) < max(bound, 2**-7 if dtype == "bfloat16" else 0)
    assert all(torch.equal(ours["resumed"][name], tensor) for name, tensor in ours["weights"].items())
    start = weights_of(policy(dtype=getattr(torch, dtype)))
    moved = {name for name, t in ours["weights"].items() if "mtp." not in name and not torch.equal(t, start[name])}
    assert moved == {
        name for name in start if "mtp." not in name and name.endswith(("q_proj.weight", "down_proj.weight"))
    }
    for first, second in zip(ours["metrics"], wanted["metrics"], strict=True):
        assert first["train/kl"] == pytest.approx(second["train/kl"], rel=0.05) and second["train/skipped"] == 0
    assert wanted["metrics"][1]["train/kl"] > 0


# ---- a head by itself


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return processes("head", tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def one_head() -> dict[str, Any]:
    return train_head(0, 1)


def test_a_head_s_weights_and_numbers_are_those_of_one_rank(
    two_heads: list[dict[str, Any]], one_head: dict[str, Any]
) -> None:
    start = head_trainer().weights()
    assert apart(one_head["state"]["weights"], start) > 5e-3, "updates move the weights by far more than the tolerance"
    for rank in two_heads:
        assert apart(rank["state"]["weights"], one_head["state"]["weights"]) < 1e-5
        for ours, wanted in zip(rank["numbers"], one_head["numbers"], strict=True):
            assert ours == pytest.approx(wanted, abs=2e-5)


def test_a_head_resumes_as_if_nothing_had_been(two_heads: list[dict[str, Any]], one_head: dict[str, Any]) -> None:
    for rank in two_heads:
        assert apart(rank["resumed"], rank["last"]) == 0
        assert apart(rank["last"], one_head["last"]) < 1e-5


def test_a_head_s_checkpoint_of_two_ranks_is_one_for_one_rank(
    two_heads: list[dict[str, Any]], one_head: dict[str, Any]
) -> None:
    training = head_trainer(lr_warmup_steps=0, max_tokens=100)
    training.load_state_dict(two_heads[0]["state"])
    training.update(rows(3))
    assert apart(training.weights(), one_head["last"]) < 1e-5
