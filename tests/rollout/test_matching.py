"""Drafts of history alone: one loop draws what single steps of a match would."""

from copy import copy

import numpy as np

from bebop.rollout.history import BEGIN, ROOT, Automaton
from bebop.systems.history.matching import BUCKETS, Followers, Next, SuffixMatch

DRAFTS = 12


def step_by_step(
    followers: Followers, row: int, step: int, match: SuffixMatch, trust: list[float], uniforms: list[float], *,
    greedy: bool, chance: float, least: float, always: bool,
) -> list[int]:  # fmt: skip
    """``Followers.go_on`` as its docstring says it."""
    drawn: list[int] = []
    for uniform in uniforms:
        found = Next.of(match, greedy)
        if found is None:
            break
        chance *= trust[found.bucket]
        if chance <= least and (drawn or not always):
            break
        followers.add(row, step + len(drawn), found, 1.0)
        drawn.append(found.draw(uniform))
        match.advance(drawn[-1])
    return drawn


def test_one_loop_draws_what_single_steps_do() -> None:
    """Of random answers of few words, so that matches end, split and start again, and of likely and doubtful ones."""
    rng = np.random.default_rng(0)
    lengths, several = [], 0
    for _ in range(300):
        texts, words = Automaton(), int(rng.integers(2, 6))
        common = rng.integers(0, words, 20)
        for _ in range(int(rng.integers(1, 6))):
            said = np.where(rng.random(20) < 0.8, common, rng.integers(0, words, 20))
            state = ROOT
            for token in (BEGIN, *said[: int(rng.integers(1, 20))].tolist()):
                state = texts.append(state, token)
        match = SuffixMatch(texts)
        for token in common[: int(rng.integers(0, 10))].tolist():
            match.advance(token)
        trust, uniforms = rng.uniform(0.6, 1.0, BUCKETS).tolist(), rng.random(DRAFTS).tolist()
        how = {
            "greedy": bool(rng.random() < 0.3),
            "chance": float(rng.uniform(0.3, 1.0)),
            "least": float(rng.choice([0.0, 0.2, 0.9])),
            "always": bool(rng.random() < 0.5),
        }
        one, other = copy(match), copy(match)
        found, wanted = Followers(), Followers()
        drawn = found.go_on(3, 2, one, trust, uniforms, **how)
        assert drawn == step_by_step(wanted, 3, 2, other, trust, uniforms, **how)
        assert found.places == wanted.places and found.chances == wanted.chances
        assert Next.of(one, False) == Next.of(other, False)  # both have read as far
        lengths.append(len(drawn))
        several += len(found.places) > len(drawn)
    assert min(lengths) == 0 and max(lengths) == DRAFTS and several > 30
