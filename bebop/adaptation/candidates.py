"""Training candidates for a pivot classifier: drafts in the policy's own completions that rejection sampling rejects.

Every position of a completion counts as if a draft of each depth had reached it. The completions come from the
target, and the draft comes from the head's distribution at that depth. SPEC 4.3 walks along one completion of
speculative decoding instead. Here one pass looks at all positions of many completions, so a candidate does not
depend on where a block happened to begin.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import torch
from torch import Tensor
from tqdm import tqdm

from bebop.adaptation.corpus import sampling_params
from bebop.config.adapt import DataConfig
from bebop.config.fields import MAX_SEED
from bebop.config.job import DecodingConfig, SamplingConfig
from bebop.kernels.pivot import residual
from bebop.kernels.uniforms import uniforms
from bebop.kernels.verify import sample
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy, tapped
from bebop.model.mtp import chain
from bebop.rollout.decoding.sampling import BatchSampling, entropy
from bebop.rollout.detokenize import completed_at
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems.pad.labels import Rollouts
from bebop.trainer.chains import TokenRow, chain_rows
from bebop.trajectory import Prompt

ROWS = 16  # completions read side by side
Reward = Callable[[str, Prompt], float]
PLACES = 32  # prefixes whose continuations run side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A rejected draft: row=3, place=12, token=9, p=0.04, q=0.3."""

    row: int  # number of the completion
    place: int  # index in the text's tokens where the draft would have stood
    token: int
    p: float
    q: float
    entropy: float  # of the target, nats
    recovered: tuple[int, ...]  # [K] replacements by rejection sampling, one a continuation
    drawn: tuple[int, ...]  # [K] tokens that the target itself draws there


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Settings of the search for candidates.

    The search drafts at most ``depth`` recursive steps, keeps at most ``places`` places a row and needs p >= ``p_min``.
    """

    sampling: SamplingConfig
    depth: int
    places: int
    rollouts: int  # K
    p_min: float
    seed: int
    draft_temperature: float | None = None  # None: the target's
    again: int = 0  # 1: the same candidates, with other continuations, independent of the first

    def probs(self, logits: Tensor, drafted: bool) -> Tensor:
        """Return sampling distributions [n, V] of logits [n, V]; greedy drafting is not supported."""
        own = self.sampling.temperature
        if drafted and self.draft_temperature is not None:
            own = self.draft_temperature
        one = BatchSampling(
            temperature=torch.tensor([own], device=logits.device),
            top_k=torch.tensor([self.sampling.top_k], device=logits.device) if self.sampling.top_k else None,
            top_p=torch.tensor([self.sampling.top_p], device=logits.device) if self.sampling.top_p < 1 else None,
        )
        return one.probs(logits[None])[0]


def seeds_of(seed: int, row: int, place: int, rollouts: int) -> list[int]:
    """Return the seeds of the K continuations at one place: common random numbers for every token that stands there.

    They never equal the seeds that completions are sampled with, which count from seed << 40.
    """
    return [(seed % MAX_SEED << 40) + (1 << 39) + (row << 25) + (place << 11) + k for k in range(rollouts)]


@torch.no_grad()
def find_candidates(policy: Policy, rows: Sequence[TokenRow], search: Search) -> list[Candidate]:
    """Return the rejected drafts of all rows, grouped by place. One seed gives the same candidates at every call."""
    found: list[Candidate] = []
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        ids = chain_rows(part, 1, policy.device).token_ids
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        hidden = policy.hidden(ids, positions, CausalContext())
        assert policy.mtp is not None
        heads = list(chain(policy.mtp, policy.embed(ids), hidden, search.depth))
        for i, row in enumerate(part):
            states = [h[i] for h in heads]
            found += _of_row(policy, start + i, row, hidden[i], states, search)
    return found


def _of_row(
    policy: Policy, number: int, row: TokenRow, hidden: Tensor, heads: Sequence[Tensor], search: Search
) -> list[Candidate]:
    """Return the candidates of one row.

    Args:
        hidden: the backbone's hidden states [L, d] of the row's text.
        heads: the head's hidden states at each depth k, [L - k, d].
    """
    first, end, device = len(row.prompt), len(row.token_ids), hidden.device
    if end == first or first < 2:
        return []
    places = torch.arange(first, end, device=device)
    p = search.probs(policy.logits(hidden[first - 1 : end - 1]), drafted=False)
    doubt = entropy(p)
    seed = torch.full_like(places, ~((search.seed << 40) + number))  # negative: no completion is sampled with it
    numbers = uniforms(seed, places, 2 * search.depth + 1)
    found: dict[int, dict[int, Candidate]] = {}
    for depth in range(1, search.depth + 1):
        reached = places[depth - 1 :]  # a chain begins in the completion
        at = slice(depth - 1, None)
        if not len(reached):
            break
        q = search.probs(policy.logits(heads[depth - 1][reached - depth - 1]), drafted=True)
        token = sample(q, numbers[at, 2 * depth - 2])
        at_p, at_q = (x.gather(-1, token[:, None])[:, 0] for x in (p[at], q))
        rejected = ~(numbers[at, 2 * depth - 1] * at_q < at_p) & (at_p >= search.p_min)
        for j in rejected.nonzero()[:, 0].tolist():
            place, choice = int(reached[j]), int(token[j])
            if choice in policy.eos_token_ids or choice in found.get(place, {}):
                continue
            own = torch.tensor(seeds_of(search.seed + search.again, number, place, search.rollouts), device=device)
            # The engine's own numbers at this place: for a recovered token, and for one that no draft precedes.
            draws = uniforms(own, torch.full_like(own, place - 1), 2)
            instead, target = (x.expand(len(own), -1) for x in (residual(p[at][j], q[j]), p[at][j]))
            found.setdefault(place, {})[choice] = Candidate(
                row=number,
                place=place,
                token=choice,
                p=float(at_p[j]),
                q=float(at_q[j]),
                entropy=float(doubt[at][j]),
                recovered=tuple(sample(instead, draws[:, 0]).tolist()),
                drawn=tuple(sample(target, draws[:, 1]).tolist()),
            )
    order = sorted(found, key=lambda place: float(numbers[place - first, -1]))[: search.places]
    return [candidate for place in sorted(order) for candidate in found[place].values()]


@torch.no_grad()
def layer_states(policy: Policy, texts: Sequence[tuple[int, ...]], layers: Sequence[int], batch: int = 64) -> Tensor:
    """Return the states [n, layers, 2, d] after the given layers at the last two tokens of each text.

    The first of the two states predicts the candidate; the second is at the candidate.
    """
    states: list[Tensor] = [torch.zeros(0)] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    with tapped(policy.backbone.get_decoder().layers, tuple(layers)) as kept:
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            width = max(len(texts[i]) for i in part)
            ids = torch.tensor([[*texts[i], *[0] * (width - len(texts[i]))] for i in part], device=policy.device)
            policy.hidden(ids, torch.arange(width, device=ids.device).expand_as(ids), CausalContext())
            for j, i in enumerate(part):
                last = slice(len(texts[i]) - 2, len(texts[i]))
                states[i] = torch.stack([kept[layer][j, last].float().cpu() for layer in layers])
    return torch.stack(states)


# ---- continuations by the target of a completion with and without a candidate, and their rewards (SPEC 4.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """One continuation: the text of the whole completion, and whether it succeeds."""

    text: str
    success: bool
    cut: bool = False  # at the limit of tokens, maybe within a number


class Continuations:
    """Continue completions by plain decoding, in which a random number depends only on the place in the text.

    The k-th continuations of a prefix, of the prefix with a candidate, and of the prefix with a replacement token draw
    the same numbers at the same places. A prefix is continued once for all its candidates. Continuations that begin
    with the same token are identical and run once: rejection sampling mostly replaces a candidate with the token that
    the target draws.
    """

    def __init__(
        self, policy: Policy, data: DataConfig, reward: Reward, *, seed: int, rollouts: int, success: float, judge: bool
    ) -> None:
        """Start the engine that continues completions.

        Args:
            success: the least reward of a completion that succeeds.
            judge: whether to check the steps of the completions that succeed.
        """
        self.data, self.reward, self.policy = data, reward, policy
        self.seed, self.rollouts, self.success, self.judge = seed, rollouts, success, judge
        plain = DecodingConfig(system="autoregressive", draft_tokens=0)
        self.engine = TorchEngine(policy, plain, slots=data.slots, max_length=data.max_length, measure=False)

    def run(
        self, prompts: Sequence[Prompt], rows: Sequence[TokenRow], candidates: Sequence[Candidate], bar: tqdm
    ) -> Iterator[list[Rollouts]]:
        """Yield the rollouts of the candidates, in order and in parts. The candidates of one place must be adjacent."""
        self.first = {row.prompt: i for i, row in reversed(list(enumerate(rows)))}  # questions repeat
        places = (list(group) for _, group in groupby(candidates, key=lambda c: (c.row, c.place)))
        while part := list(islice(places, PLACES)):
            yield self._part(prompts, rows, part)
            bar.update(sum(map(len, part)))

    def _part(
        self, prompts: Sequence[Prompt], rows: Sequence[TokenRow], places: Sequence[Sequence[Candidate]]
    ) -> list[Rollouts]:
        wanted: list[tuple[int, tuple[int, ...], int]] = []  # row, text, seed
        for place in places:
            row, at = place[0].row, place[0].place
            prefix = rows[row].token_ids[:at]
            seeds = seeds_of(self.seed, row, at, self.rollouts)
            wanted += [(row, (*prefix, token), s) for token, s in zip(place[0].drawn, seeds, strict=True)]
            for one in place:
                wanted += [(row, (*prefix, one.token), s) for s in seeds]
                wanted += [(row, (*prefix, token), s) for token, s in zip(one.recovered, seeds, strict=True)]
        endings = self._finish(prompts, rows, wanted)
        found, k = [], self.rollouts
        for place in places:
            reference, endings = endings[:k], endings[k:]
            for one in place:
                value, residual, endings = endings[:k], endings[k : 2 * k], endings[2 * k :]
                found.append(self._rollouts(rows[one.row], one, value, reference, residual))
        return found

    def _rollouts(
        self,
        row: TokenRow,
        one: Candidate,
        value: Sequence[Ending],
        reference: Sequence[Ending],
        residual: Sequence[Ending],
    ) -> Rollouts:
        prefix = row.token_ids[: one.place]
        return Rollouts(
            prompt=self.first[row.prompt],
            prefix=prefix,
            token=one.token,
            p=one.p,
            q=one.q,
            entropy=one.entropy,
            value=_bits(value),
            reference=_bits(reference),
            residual=_bits(residual),
            judged=self.judge and unsound(self._text(row, prefix), value),
        )

    def _finish(
        self, prompts: Sequence[Prompt], rows: Sequence[TokenRow], wanted: Sequence[tuple[int, tuple[int, ...], int]]
    ) -> list[Ending]:
        """Return the finished completion of each wanted text.

        Equal texts are adjacent in the engine's queue, so the engine reads them once.
        """
        stops, most = self.policy.eos_token_ids, self.data.sampling.max_new_tokens
        strings, tokenizer = self.data.sampling.stop, self.policy.tokenizer

        def whole(i: int) -> int:
            """Return the tokens of a text up to the one that completes a stop string; 0 without one."""
            begin = len(rows[distinct[i][0]].prompt)
            count = completed_at(tokenizer, texts[i][begin:], strings) if strings else 0
            return count and begin + count

        distinct = sorted(set(wanted))
        texts: dict[int, tuple[int, ...]] = {}
        for i, (row, text, seed) in enumerate(distinct):
            room = most - (len(text) - len(rows[row].prompt))
            texts[i] = text
            if room > 0 and text[-1] not in stops and not whole(i):
                sampling = sampling_params(self.policy, self.data.sampling, seed)
                own = dataclasses.replace(sampling, max_new_tokens=room)
                self.engine.add(Request(id=i, token_ids=text, params=own))
        while self.engine.unfinished:
            for ended in self.engine.step():
                texts[ended.id] += tuple(ended.completion.token_ids.tolist())
        endings: dict[tuple[int, tuple[int, ...], int], Ending] = {}
        for i, one in enumerate(distinct):
            # The engine looks for stop strings in what it adds, which may hold the end of one alone.
            cut = whole(i)
            answer = self._text(rows[one[0]], texts[i][: cut or None], stopped=cut > 0)
            success = self.reward(answer, prompts[one[0]]) >= self.success
            endings[one] = Ending(text=answer, success=success, cut=not cut and texts[i][-1] not in stops)
        return [endings[one] for one in wanted]

    def _text(self, row: TokenRow, ids: Sequence[int], stopped: bool = False) -> str:
        """Return the part of a text that the reward function reads: the decoded completion without the prompt.

        ``stopped``: it ends with the token that completes a stop string.
        """
        answer = ids[len(row.prompt) :]
        ended = bool(answer) and answer[-1] in self.policy.eos_token_ids
        sampling = sampling_params(self.policy, self.data.sampling, 0)
        return self.engine.text(answer, sampling, "stop" if ended or stopped else "length")


def unsound(prefix: str, endings: Sequence[Ending]) -> bool:
    """Return whether the successful continuation of median length has a wrong step that its prefix has not."""
    successes = sorted((e for e in endings if e.success), key=lambda one: len(one.text))
    if not successes:
        return False
    chosen = successes[len(successes) // 2]
    text = re.sub(r"\d+$", "", chosen.text) if chosen.cut else chosen.text  # such a number may go on
    return wrong_steps(text, len(prefix)) > 0


def _bits(endings: Sequence[Ending]) -> str:
    return "".join("01"[ending.success] for ending in endings)


# ---- judge of worked steps, instead of a language model (SPEC 4.3)

EQUATION = re.compile(r"(?<![\d+\-=])(-?\d+)([+-])(\d+)=(-?\d+)(?!\d)")
EXTREME = re.compile(r"\b(least|most) (\d+) left (\d+(?: \d+)*)")


def wrong_steps(text: str, known: int = 0) -> int:
    """Return the number of wrong steps in a text, without those that its first ``known`` characters already hold.

    Two kinds of steps are judged. Sums and differences (``8-4=4``) must be correct. In ``least 3 left 21 76`` the first
    number must be the least of the list, and likewise for ``most``. All other text counts as neither right nor wrong.

    >>> wrong_steps("8-4=4; 4+1=6, then least 76 left 21")
    2
    >>> wrong_steps("12+4=17", known=6)  # 1 is no result yet
    1
    """
    while 0 < known < len(text) and text[known - 1 : known + 1].isdigit():
        known -= 1  # within a number
    before = set(_wrong(text[:known]))
    return sum(start not in before for start in _wrong(text))


def _wrong(text: str) -> Iterator[int]:
    """Yield where each wrong step of a text begins."""
    signs = {"+": 1, "-": -1}
    for step in EQUATION.finditer(text):
        a, sign, b, c = step.groups()
        if int(a) + signs[sign] * int(b) != int(c):
            yield step.start()
    ends = {"least": min, "most": max}
    for step in EXTREME.finditer(text):
        word, first, rest = step.groups()
        if ends[word]((int(first), *map(int, rest.split()))) != int(first):
            yield step.start()
