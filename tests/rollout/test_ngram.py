"""Lookups in the context against a plain search, and on the engine."""

import torch

from bebop.config.job import DecodingConfig
from bebop.rollout.decoding.ngram import MAX_SUFFIX, last_match
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import DecodeStats
from tests.builders import bare_policy, requests


def plain(tokens: list[int]) -> int | None:
    """The last place before the end at which the longest known suffix ends."""
    for size in range(min(MAX_SUFFIX, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 2, size - 2, -1):
            if tokens[end - size + 1 : end + 1] == tokens[-size:]:
                return end
    return None


def test_a_match_is_that_of_a_plain_search() -> None:
    generator = torch.Generator().manual_seed(0)
    context = torch.randint(0, 4, (300, 20), generator=generator)
    newest = torch.randint(0, 20, (300,), generator=generator)
    end, matched = last_match(context, newest)
    wanted = [plain(row[: n + 1]) for row, n in zip(context.tolist(), newest.tolist(), strict=True)]
    assert [e if m else None for e, m in zip(end.tolist(), matched.tolist(), strict=True)] == wanted
    assert None in wanted and len(set(wanted)) > 10


def test_a_text_that_repeats_itself_is_drafted_without_a_head() -> None:
    """Greedy completions of a small model run in circles; the drafts come from prompt and completion alone."""
    policy = bare_policy(seed=1)
    policy.mtp = None
    answers = {}
    for system in ("ngram", "autoregressive"):
        one = TorchEngine(policy, DecodingConfig(system=system, draft_tokens=3), slots=2, max_length=96)
        asked = requests([[1, 2, 3, 1, 2], [4, 5], [6]], temperature=0.0, max_new_tokens=60)
        answers[system] = generate(one, asked)
    ngram, plainly = answers.values()
    assert [a.token_ids.tolist() for a in ngram] == [a.token_ids.tolist() for a in plainly]
    stats = sum((a.stats for a in ngram), DecodeStats())
    assert stats.accept_length > 1.5 and stats.draft_forwards == 0
