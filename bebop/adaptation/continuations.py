"""What becomes of an answer with and without a candidate: continuations by the target, and their rewards (SPEC 4.3)."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from tqdm import tqdm

from bebop.adaptation.candidates import Candidate, seeds_of
from bebop.adaptation.corpus import params
from bebop.config import DecodingConfig
from bebop.config_adapt import DataConfig
from bebop.model.backbone import Policy
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems.pad.labels import Rollouts
from bebop.tasks.steps import wrong_steps
from bebop.trainer.chains import TokenRow
from bebop.trajectory import Prompt

Reward = Callable[[str, Prompt], float]
PLACES = 32  # prefixes whose continuations run side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """One continuation: the whole answer's text, and whether it succeeds."""

    text: str
    success: bool


class Continuations:
    """Continues answers by plain decoding, so that a random number belongs to a place in the text and to nothing else.

    The k-th continuations of a prefix, of a candidate after it and of a token in its stead then draw the same numbers
    at the same places, and the prefix is continued once for all its candidates. Those that begin with the same token
    are one, and run once: what replaces a candidate is mostly what the target draws.
    """

    def __init__(
        self, policy: Policy, data: DataConfig, reward: Reward, *, seed: int, rollouts: int, success: float, judge: bool
    ) -> None:
        """``success``: the least reward of an answer that succeeds; ``judge``: check the steps of those that do."""
        self.data, self.reward, self.policy = data, reward, policy
        self.seed, self.rollouts, self.success, self.judge = seed, rollouts, success, judge
        plain = DecodingConfig(system="autoregressive", draft_tokens=0)
        self.engine = TorchEngine(policy, plain, slots=data.slots, max_length=data.max_length, measure=False)

    def run(
        self, prompts: Sequence[Prompt], rows: Sequence[TokenRow], candidates: Sequence[Candidate], bar: tqdm
    ) -> Iterator[list[Rollouts]]:
        """Rollouts of candidates, in their order, in parts; those of one place belong together."""
        self.first = {row.prompt: i for i, row in reversed(list(enumerate(rows)))}  # a question that is asked again
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
        """The answers that texts become. Equal texts come one after another, so that the engine reads them once."""
        stops, most = self.policy.eos_token_ids, self.data.sampling.max_new_tokens
        distinct = sorted(set(wanted))
        texts: dict[int, tuple[int, ...]] = {}
        for i, (row, text, seed) in enumerate(distinct):
            room = most - (len(text) - len(rows[row].prompt))
            texts[i] = text
            if room > 0 and text[-1] not in stops:
                sampling = params(self.policy, self.data.sampling, seed)
                own = dataclasses.replace(sampling, max_new_tokens=room)
                self.engine.add(Request(id=i, token_ids=text, params=own))
        while self.engine.unfinished:
            for ended in self.engine.step():
                texts[ended.id] += tuple(ended.completion.token_ids.tolist())
        endings: dict[tuple[int, tuple[int, ...], int], Ending] = {}
        for i, one in enumerate(distinct):
            answer = self._text(rows[one[0]], texts[i])
            endings[one] = Ending(text=answer, success=self.reward(answer, prompts[one[0]]) >= self.success)
        return [endings[one] for one in wanted]

    def _text(self, row: TokenRow, ids: Sequence[int]) -> str:
        """What a reward sees of a text."""
        answer = ids[len(row.prompt) :]
        ended = bool(answer) and answer[-1] in self.policy.eos_token_ids
        sampling = params(self.policy, self.data.sampling, 0)
        return self.engine.text(answer, sampling, "stop" if ended else "length")


def unsound(prefix: str, endings: Sequence[Ending]) -> bool:
    """Whether the success of median length has a wrong step that its prefix has not."""
    successes = sorted((e.text for e in endings if e.success), key=len)
    return bool(successes) and wrong_steps(successes[len(successes) // 2]) > wrong_steps(prefix)


def _bits(endings: Sequence[Ending]) -> str:
    return "".join("01"[ending.success] for ending in endings)
