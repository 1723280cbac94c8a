"""What the plugin shows to a white box, from made-up steps that are verified for real.

That SGLang calls it is tested in tests/integration/sglang.
"""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bebop import __version__
from bebop.certify.white_box import WhiteBox
from bebop.kernels.verify import chain_verify, sample
from bebop.rollout.sglang import plugin
from bebop.rollout.sglang.certify import ENTRY, RUNS, Inside, name

B, K, V, STOP = 4, 2, 7, 6
MINE, OTHER = "f00", "ba5"


class Steps:
    """Verification steps as SGLang has them, with drafts drawn from q and judged by rejection sampling."""

    def __init__(
        self, rids: list[str], drafts: bool = True, wrong: bool = False, block: bool = False, tree_topk: int = 1
    ) -> None:
        self.chance = torch.Generator().manual_seed(3)
        self.rids, self.drafts, self.wrong, self.tree_topk = rids, drafts, wrong, tree_topk
        settings = SimpleNamespace(speculative_use_block_verification=block)
        self.inside = Inside(plugin._distribution, lambda: True, lambda: settings)
        self.sampling = SimpleNamespace(
            temperatures=torch.tensor([[0.5], [1.0], [2.0], [1.0]]),
            need_top_k_sampling=False,
            need_top_p_sampling=False,
            is_all_greedy=False,
        )
        self.idle = False
        self.calls = 0

    def run(self, count: int = 1) -> list[dict[str, Any]] | None:
        """Entries of the last of so many steps."""
        found = None
        for _ in range(count):
            found = self._step()
        return found

    def _step(self) -> list[dict[str, Any]] | None:
        q = (1.5 * torch.randn(B, K, V, generator=self.chance)).softmax(-1)
        drafted = sample(q, torch.rand(B, K, generator=self.chance)) if self.drafts else q.argmax(-1)
        verify = SimpleNamespace(
            draft_probs=q if self.drafts else None,
            draft_token_num=K + 1,
            tree_topk=self.tree_topk,
            draft_token=torch.cat([torch.zeros(B, 1).long(), drafted], 1).int().flatten(),
        )
        ends = SimpleNamespace(stop_token_ids=[STOP], ignore_eos=False)
        requests = [SimpleNamespace(rid=rid, sampling_params=ends, eos_token_ids=None) for rid in self.rids]
        batch = SimpleNamespace(
            sampling_info=self.sampling, forward_mode=SimpleNamespace(is_idle=lambda: self.idle), reqs=requests
        )
        logits = 1.5 * torch.randn(B * (K + 1), V, generator=self.chance)
        output = SimpleNamespace(next_token_logits=logits, customized_info={"bebop_verify": "kept"})
        self.result = self.inside(self._verified, verify, batch, output)
        return (output.customized_info or {}).get(ENTRY)

    def _verified(self, verify: Any, batch: Any, logits: Any) -> Any:
        """Stands for ``eagle_sample``: a penalty goes into the logits in place, drafts are judged, tokens placed."""
        self.calls += 1
        logits.next_token_logits[:, 0] -= 1.0
        target = plugin._distribution(logits.next_token_logits, self.sampling, K + 1).view(B, K + 1, V)
        if self.wrong:
            target[:, K] = target[:, K - 1]
        drafted = verify.draft_token.view(B, K + 1)[:, 1:].long()
        uniforms = torch.rand(B, K + 2, generator=self.chance)
        accepted, following = chain_verify(drafted, verify.draft_probs, target, uniforms)
        places = torch.arange(B * (K + 1)).view(B, K + 1)
        index = torch.where(torch.arange(K + 1) <= accepted[:, None], places, -1).int()
        predicted = torch.zeros(B * (K + 1), dtype=torch.int32)
        predicted[places[:, :K]] = drafted.int()
        predicted[places[torch.arange(B), accepted]] = following.int()
        if verify.draft_probs is not None:
            verify.draft_probs.zero_()  # what is left of it afterwards may be anything
        return predicted, (accepted + 1).int(), index


def mine(*numbers: int) -> list[str]:
    return [name(MINE, str(number)) for number in numbers]


@pytest.mark.slow
def test_an_intact_step_passes_and_a_wrong_row_does_not() -> None:
    """The same draws, tested with the target as verification has it: masks and penalties in, temperatures apart."""
    intact, wrong = Steps(mine(1, 2, 3, 4)), Steps(mine(1, 2, 3, 4), wrong=True)
    intact.run(250)
    wrong.run(250)
    box, other = intact.inside.boxes[MINE], wrong.inside.boxes[MINE]
    assert box.cycles == 1000 and box.drafts == 2000 and not box.untested
    assert box.log_e < 3 and other.log_e > 20
    assert other.evidence()[0].group == "bonus"


def test_only_rows_of_a_run_are_looked_at() -> None:
    steps = Steps([*mine(1), "bebop-1-2.", name(OTHER, "5"), "certify-"])
    entries = steps.run(3)
    assert entries is not None
    boxes = steps.inside.boxes
    assert {run: box.cycles for run, box in boxes.items()} == {MINE: 3, OTHER: 3}
    counts = (steps.result[1] - 1).tolist()
    assert entries == [
        {"accepted": counts[0], "state": ""}, {}, {"accepted": counts[2], "state": ""}, {},
    ]  # fmt: skip


def test_other_traffic_goes_through_untouched() -> None:
    steps = Steps(["a", "b", "c", "certify-x"])
    assert steps.run() is None and steps.calls == 1 and not steps.inside.boxes
    for quiet in ("is_all_greedy", "idle"):
        steps = Steps(mine(1, 2, 3, 4))
        setattr(steps if quiet == "idle" else steps.sampling, quiet, True)
        assert steps.run() is None and steps.calls == 1 and not steps.inside.boxes


def test_what_was_seen_is_fetched_by_a_request_that_is_not_looked_at() -> None:
    steps = Steps(mine(1, 2, 3, 4))
    steps.run(20)
    steps.rids = [*mine(5), name(MINE, "state-1"), "x", "y"]
    entries = steps.run()
    assert entries is not None and entries[0]["state"] == ""
    fetched = WhiteBox()
    state = json.loads(entries[1]["state"])
    assert state["bebop"] == __version__
    fetched.load_state_dict(state["box"])
    box = steps.inside.boxes[MINE]
    assert fetched.cycles == box.cycles == 81 and fetched.log_e == box.log_e
    assert fetched.evidence() == box.evidence()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "untested"),
    [({"drafts": False}, {"draft_draw"}), ({"block": True}, {"acceptance, recovered"})],
)
def test_what_cannot_be_tested_is_said(kind: dict[str, bool], untested: set[str]) -> None:
    steps = Steps(mine(1, 2, 3, 4), **kind)
    steps.run(100)
    box = steps.inside.boxes[MINE]
    assert set(box.untested) == untested and box.log_e < 3


def test_trees_of_drafts_are_not_judged_as_chains() -> None:
    steps = Steps(mine(1, 2, 3, 4), drafts=False, tree_topk=2)
    steps.run(3)
    box = steps.inside.boxes[MINE]
    assert box.cycles == 0 and box.skipped == 3 * B and set(box.untested) == {"draws of a tree"}


def test_boxes_of_old_runs_go() -> None:
    steps = Steps([])
    for run in range(RUNS + 2):
        steps.rids = [name(f"{run}", "1")] * B
        steps.run()
    assert list(steps.inside.boxes) == [f"{run}" for run in range(2, RUNS + 2)]
