"""Decoding with a record of every cycle, including the acceptance of drafts after a rejected one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.adaptation.corpus import drafting_config, sampling_params
from bebop.config.adapt import DataConfig
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import AcceptanceRule, Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.trajectory import Completion, Prompt

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycles:
    """C decoding cycles of K drafts; a step is live unless a draft before it ends the completion."""

    answer: NDArray[np.int64]  # [C] index of the prompt
    start: NDArray[np.int64]  # [C] place in the answer of the first drafted token
    accepted: Array  # [C] accepted drafts that count
    survive: Array  # [C, K] min(1, p(y) / q(y)) of the drafted token y
    overlap: Array  # [C, K] sum_v min(p, q) at the drafted prefix
    live: Array  # [C, K] 1 or 0


@dataclass(slots=True)
class RecordingRule:
    """An acceptance rule that decides as another one does and records its inputs and decisions."""

    rule: AcceptanceRule
    stops: tuple[int, ...]
    seen: list[dict[str, Tensor]] = field(default_factory=list)

    exact: bool = True
    layers: tuple[int, ...] = ()

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """Decide as the inner rule and record the batch; see ``AcceptanceRule``."""
        accepted = self.rule.accept(rows, draft, out, uniforms)
        p, q = out.probs[:, :-1], draft.probs
        assert q is not None, "drafts are sampled here"
        of_token = [probs.gather(-1, draft.tokens[..., None])[..., 0] for probs in (p, q)]
        stop = torch.isin(draft.tokens, torch.tensor(self.stops))
        ended = stop.long().cumsum(1)
        first = (ended == 0).sum(1)  # drafts before the first stop token
        self.seen.append({
            "accepted": torch.minimum(accepted.lengths, first + 1),
            "emitted": torch.minimum(accepted.lengths, first) + 1,
            "survive": (of_token[0] / of_token[1]).clamp_max(1),
            "overlap": torch.minimum(p, q).sum(-1),
            "live": (ended - stop.long() == 0).float(),
        })  # fmt: skip
        return accepted


def record(
    policy: Policy, prompts: Sequence[Prompt], data: DataConfig, draft_tokens: int, seed: int
) -> tuple[Cycles, list[Completion]]:
    """Decode a completion of each prompt; return every cycle of every completion, and the completions."""
    decoding = drafting_config(policy, draft_tokens=draft_tokens)
    engine = TorchEngine(policy, decoding, slots=data.slots, max_length=data.max_length)
    assert isinstance(engine.decoder, DraftVerify)
    engine.decoder.rule = rule = RecordingRule(engine.decoder.rule, policy.eos_token_ids)
    for i, prompt in enumerate(prompts):
        sampling = sampling_params(policy, data.sampling, (seed << 40) + i)
        engine.add(Request(id=i, token_ids=prompt.token_ids, params=sampling))
    done: dict[int, Completion] = {}
    batches: list[list[int]] = []
    while engine.unfinished:
        # Rows of a cycle: running requests, then requests admitted from the queue.
        batches.append([r.id for r in [*engine.active, *engine.waiting]][: data.slots])
        done |= {f.id: f.completion for f in engine.step()}
    return cycles(rule.seen, batches), [done[i] for i in range(len(prompts))]


def cycles(seen: Sequence[dict[str, Tensor]], batches: Sequence[Sequence[int]]) -> Cycles:
    """Return one table of all cycles, from the rule's records of each engine step and the request ids of its rows."""
    place: dict[int, int] = {}
    starts = []
    for columns, batch in zip(seen, batches, strict=True):
        for answer, emitted in zip(batch, columns["emitted"].tolist(), strict=True):
            starts.append(place.get(answer, 0))
            place[answer] = starts[-1] + emitted
    table = {
        name: torch.cat([columns[name] for columns in seen]).double().numpy() for name in seen[0] if name != "emitted"
    }
    return Cycles(answer=np.array([i for batch in batches for i in batch]), start=np.array(starts), **table)
