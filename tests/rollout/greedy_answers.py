"""Greedy answers of a system, which are those of plain decoding, and a rule with which they are not."""

from collections.abc import Sequence

from torch import Tensor

from bebop.config import DecodingConfig
from bebop.kernels.verify import chain_verify
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.rules.rejection import Rejection
from bebop.rollout.torch_engine import TorchEngine, generate
from tests.builders import requests


class AcceptsOneMore(Rejection):
    """Takes a draft that was not the target's choice."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        kept, token = chain_verify(draft.tokens, draft.probs, out.probs, uniforms, draft.lengths)
        return Accepted.chain(draft, (kept + 1).clamp_max(draft.tokens.shape[1]), token)


def greedy(
    policy: Policy, prompts: Sequence[Sequence[int]], system: str, drafts: int, rule: Rejection | None = None
) -> list[list[int]]:
    """Sixteen tokens for each prompt, at temperature 0."""
    one = TorchEngine(policy, DecodingConfig(system=system, draft_tokens=drafts), slots=6, max_length=64)
    assert isinstance(one.decoder, DraftVerify)
    one.decoder.rule = rule or one.decoder.rule
    return [a.token_ids.tolist() for a in generate(one, requests(prompts, temperature=0.0, max_new_tokens=16))]
