"""Rules that hold for every sampler and distribution: ends, lengths, ids, log-probs, versions, cycles.

They are deterministic: one finding is proof. None of them needs a reference.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from bebop.certify.answers import Answer

REASONS = ("stop", "length", "abort")
# A log-softmax in single precision may return a log-prob of 0 as a value up to this far above 0.
ABOVE_ZERO = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A broken rule.

    >>> str(Finding(request=3, position=7, sentence="2 tokens follow the stop token 11"))
    'request 3, token 7: 2 tokens follow the stop token 11'
    """

    request: int
    position: int | None  # in the completion, from 0; None: the completion as a whole
    sentence: str

    def __str__(self) -> str:
        place = f"request {self.request}" if self.position is None else f"request {self.request}, token {self.position}"
        return f"{place}: {self.sentence}"


def check_structure(answers: Sequence[Answer], *, vocabulary: int, updated: bool = False) -> list[Finding]:
    """Return findings over completions in the order of submission, at most one of a kind for each completion.

    ``vocabulary``: valid ids lie below it. ``updated``: weights may change during the run, so versions may rise.
    """
    found = list(_numbering(answers))
    for answer in answers:
        broken = chain(
            _ids(answer, vocabulary), _end(answer), _logprobs(answer), _versions(answer, updated), _cycles(answer)
        )
        found += [Finding(request=answer.request, position=place, sentence=sentence) for place, sentence in broken]
    versions = {int(version) for answer in answers if answer.versions is not None for version in answer.versions}
    one = all(answer.versions is None or len(set(answer.versions.tolist())) < 2 for answer in answers)
    if len(versions) > 1 and one and not updated and answers:
        seen = ", ".join(map(str, sorted(versions)))
        sentence = f"completions have weight versions {seen}, but no weights were updated"
        found.append(Finding(request=answers[-1].request, position=None, sentence=sentence))
    return found


Broken = Iterator[tuple[int | None, str]]


def _numbering(answers: Sequence[Answer]) -> Iterator[Finding]:
    for request, times in Counter(answer.request for answer in answers).items():
        if times > 1:
            yield Finding(request=request, position=None, sentence=f"it was answered {times} times")


def _ids(answer: Answer, vocabulary: int) -> Broken:
    outside = np.flatnonzero((answer.token_ids < 0) | (answer.token_ids >= vocabulary))
    if len(outside):
        place = int(outside[0])
        yield place, f"id {answer.token_ids[place]} is not in the vocabulary of {vocabulary}"


def _end(answer: Answer) -> Broken:
    """Check where the completion ended, and its finish reason."""
    count, reason, limit = len(answer.token_ids), answer.finish_reason, answer.limit
    places = np.flatnonzero(np.isin(answer.token_ids, answer.stops))
    stopped = bool(len(places)) and int(places[0]) == count - 1
    full = limit is not None and count >= limit
    if len(places) and not stopped:
        after = count - 1 - int(places[0])
        follow = "1 token follows" if after == 1 else f"{after} tokens follow"
        yield int(places[0]), f"{follow} the stop token {answer.token_ids[places[0]]}"
    if limit is not None and count > limit:
        yield limit, f"it has {count} tokens where {limit} were allowed"
    if reason not in REASONS:
        yield None, f"its finish reason is {reason!r}, which is none of {', '.join(REASONS)}"
    if reason == "stop" and not len(places):
        yield None, f"it says that it stopped, but none of its {count} tokens is a stop token"
    # A stop token may be the last one allowed: then both reasons are true.
    if reason == "length" and stopped and not full:
        yield count - 1, f"it ended with the stop token {answer.token_ids[-1]}, but says that it was cut for length"
    elif reason == "length" and limit is not None and count < limit:
        yield None, f"it says that it was cut for length, at {count} tokens of {limit}"


def _logprobs(answer: Answer) -> Broken:
    if answer.logprobs is None:
        return
    count, given = len(answer.token_ids), len(answer.logprobs)
    if given != count:
        yield None, f"it has {given} log-probs for {count} tokens"
        return
    wrong = np.flatnonzero(~np.isfinite(answer.logprobs))
    if len(wrong):
        yield int(wrong[0]), f"its log-prob is {answer.logprobs[wrong[0]]}: no token of probability 0 can be drawn"
    above = np.flatnonzero(answer.logprobs > ABOVE_ZERO)
    if len(above):
        yield int(above[0]), f"its log-prob is {answer.logprobs[above[0]]:.3g}: a probability above 1"


def _versions(answer: Answer, updated: bool) -> Broken:
    if answer.versions is None:
        return
    count, given = len(answer.token_ids), len(answer.versions)
    if given != count:
        yield None, f"it has {given} weight versions for {count} tokens"
        return
    steps = np.diff(answer.versions)
    changes = np.flatnonzero(steps < 0 if updated else steps != 0)
    if len(changes):
        place = int(changes[0])
        change = f"its weight version goes from {answer.versions[place]} to {answer.versions[place + 1]}"
        yield place + 1, change if updated else f"{change}, but no weights were updated"


def _cycles(answer: Answer) -> Broken:
    count = len(answer.token_ids)
    if answer.cycles is not None and (sum(answer.cycles) != count or min(answer.cycles, default=0) < 0):
        yield None, f"its decoding cycles emitted {sum(answer.cycles)} tokens, but it has {count}"
    if answer.accepted is not None and not 0 <= answer.accepted[0] <= answer.accepted[1]:
        yield None, f"it counts {answer.accepted[0]} drafts accepted of {answer.accepted[1]} tested"
