"""The monitor's fixed texts under the current policy and draft head: acceptance and entropy at each completion token.

The policy's pass is the trainer's own (``Scorer``), so sharding and precision are those of an update. The head's steps
run on the hidden states of that pass.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from bebop.config.job import DecodingConfig, SamplingConfig
from bebop.kernels.stats import pair_stats
from bebop.kernels.truncation import truncate_
from bebop.model.backbone import Policy
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep, TokenProbs
from bebop.monitor.window import per_unit
from bebop.trainer.chains import known_chains
from bebop.trainer.head_backend import HeadLoss, Shared
from bebop.trainer.objectives import Sampling, Steps
from bebop.trainer.packing import PackedRows, Row, pack
from bebop.trainer.scorer import Scorer, whole_tables
from bebop.trajectory import Completion

TEMPERATURES = (1.0, 0.4, 0.6, 0.8, 1.25, 1.5, 1.8)  # of the sweep, times the run's own, which comes first
CHUNK = 1 << 23  # logits held at once
LIKELY = 6  # tokens of each distribution that are kept at the contexts that are shown
READ_BEFORE = 16  # tokens before the shown place that are shown as its context


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReader:
    """Reads texts as the engine would draft on them (repetition penalty and min-p left out)."""

    policy: Policy
    scorer: Scorer
    sampling: SamplingConfig
    decoding: DecodingConfig
    max_tokens: int
    rank: int
    world: int

    @torch.no_grad()
    def read(self, texts: Sequence[ProbeText], sweep: bool) -> tuple[ProbeReading, Sweep | None]:
        """Return the acceptance of the head's step 1 at every completion token; all ranks call it and get the same.

        ``sweep``: read at seven temperatures, with the accept length that a chain would have on these texts, as long as
        drafts of the system may be.
        """
        temperatures = TEMPERATURES if sweep else TEMPERATURES[:1]
        shared = whole_tables(self.policy) if self.world > 1 else None
        measured: dict[int, Tensor] = {}
        shown: dict[int, TokenProbs] = {}
        for packed in self._packed(texts):
            measured |= self._measure(packed, temperatures, shared, texts, shown)
        parts: list[tuple[dict[int, Tensor], dict[int, TokenProbs]]] = [(measured, shown)] * self.world
        if self.world > 1:
            dist.all_gather_object(parts, ({text: numbers.cpu() for text, numbers in measured.items()}, shown))
        merged = {text: numbers.cpu() for part, _ in parts for text, numbers in part.items()}
        seen = {text: probs for _, part in parts for text, probs in part.items()}
        prompts = {text.prompt: number for number, text in reversed(list(enumerate(texts)))}
        own = [prompts[texts[text].prompt] for text in sorted(merged)]  # completions of one prompt resemble one another
        unit = np.repeat(own, [merged[text].shape[1] for text in sorted(merged)])
        numbers = torch.cat([merged[text] for text in sorted(merged)], 1).double().numpy()  # [temperatures, N, 4]
        readings = [
            ProbeReading(overlap=n[:, 0], entropy=n[:, 1], unit=unit, chance=float(n[:, 3].mean()) if luck else None)
            for n, luck in zip(numbers, [sweep] + [False] * (len(temperatures) - 1), strict=True)
        ]
        readings[0] = dataclasses.replace(readings[0], token_probs=tuple(seen[text] for text in sorted(seen)))
        if not sweep:
            return readings[0], None
        entropy, length = numbers[..., 1].mean(1), numbers[..., 2].mean(1)
        sums = np.stack([per_unit(unit, _columns(n)) for n in numbers])
        return readings[0], Sweep(entropy=tuple(entropy), length=tuple(length), readings=tuple(readings[1:]), sums=sums)

    def _packed(self, texts: Sequence[ProbeText]) -> list[PackedRows]:
        """Return this rank's micro-batches of the texts."""
        rows = []
        for text in texts:
            size = len(text.answer)
            completion = Completion(
                token_ids=np.array(text.answer, dtype=np.int64),
                logprobs=np.zeros(size, dtype=np.float32),
                versions=np.zeros(size, dtype=np.int64),
            )
            rows.append(Row(prompt=text.prompt, completion=completion, advantage=0.0, weight=0.0))
        packed = pack(rows, self.max_tokens, self.world)[self.rank :: self.world]
        return [part.to(self.policy.device, self.scorer.loss_dtype) for part in packed]

    def _measure(
        self,
        packed: PackedRows,
        temperatures: Sequence[float],
        shared: Shared | None,
        texts_read: Sequence[ProbeText],
        shown: dict[int, TokenProbs],
    ) -> dict[int, Tensor]:
        """Return by text the numbers [temperatures, tokens, 4].

        They are acceptance, entropy, accept length and acceptance by chance. ``shown`` gets both distributions at the
        chosen token of each text.
        """
        self.scorer.kept = []
        self.scorer(packed)
        [(_, hidden)], self.scorer.kept = self.scorer.kept, None
        answered = [x for x in zip(packed.rows.tolist(), packed.known(hidden), strict=True) if x[1].answer.any()]
        texts, rows = [text for text, _ in answered], [row for _, row in answered]
        if not rows:
            return {}
        layout = known_chains(rows, self.decoding.depth if len(temperatures) > 1 else 1)
        if int(layout.steps.max()) == 0:
            return {}
        known = torch.nn.utils.rnn.pad_sequence([row.hidden for row in rows], batch_first=True)
        seen: list[Tensor] = []

        def measure(steps: Steps) -> Tensor:
            # Acceptance of unrelated distributions is measured once, in a sweep.
            lucky = [len(temperatures) > 1, *[False] * (len(temperatures) - 1)]
            seen.append(torch.stack([self._numbers(steps, *pair) for pair in zip(temperatures, lucky, strict=True)]))
            shown.update(self._shown(steps, texts, counts, texts_read))
            return steps.draft.new_zeros(())

        sampling = Sampling(temperature=self.sampling.temperature)
        counts = (layout.steps > 0).sum(1).tolist()
        HeadLoss(self.policy, sampling, self.scorer.mixed)(layout, measure, known, shared)
        return dict(zip(texts, seen[0].split(counts, 1), strict=True))

    def _shown(
        self, steps: Steps, texts: Sequence[int], counts: Sequence[int], texts_read: Sequence[ProbeText]
    ) -> dict[int, TokenProbs]:
        """Return both distributions of the first step at the token that each text selects."""
        chosen = steps.mask[..., 0]
        draft, target = steps.draft[chosen][:, 0], steps.target[chosen][:, 0]
        shown, start = {}, 0
        for text, count in zip(texts, counts, strict=True):
            # The first chain drafts the completion's first token; behind a prompt of one token, its second.
            place = texts_read[text].shown - (len(texts_read[text].prompt) == 1)
            if 0 <= place < count:
                rows = slice(start + place, start + place + 1)
                q = self._distribution(draft[rows], steps.weight, 1.0, draft=True)
                p = self._distribution(target[rows], steps.weight, 1.0, draft=False)
                shown[text] = self._likely(text, texts_read[text], q[0].softmax(-1), p[0].softmax(-1))
            start += count
        return shown

    def _likely(self, number: int, text: ProbeText, q: Tensor, p: Tensor) -> TokenProbs:
        likely = torch.cat([sampling.topk(min(LIKELY, len(sampling))).indices for sampling in (p, q)]).unique()
        likely = likely[p[likely].argsort(descending=True)]
        decode = partial(self.policy.tokenizer.decode, clean_up_tokenization_spaces=False)  # as completions are
        return TokenProbs(
            text=number,
            context=str(decode([*text.prompt, *text.answer[: text.shown]][-READ_BEFORE:])),
            ids=tuple(likely.tolist()),
            tokens=tuple(str(decode([token])) for token in likely.tolist()),
            target=tuple(round(x, 4) for x in p[likely].tolist()),
            draft=tuple(round(x, 4) for x in q[likely].tolist()),
            overlap=round(float(torch.minimum(p, q).sum()), 4),
        )

    def _numbers(self, steps: Steps, temperature: float, luck: bool) -> Tensor:
        """Return the four numbers [n, 4] of the anchors that have a step, in order."""
        chosen = steps.mask[..., 0]
        mask = steps.mask[chosen]  # [n, K]
        numbers = self._rates(steps.draft[chosen][mask], steps.target[chosen][mask], steps.weight, temperature, luck)
        rates, entropy, chance = (torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, x) for x in numbers)
        return torch.stack([rates[:, 0], entropy[:, 0], 1 + rates.cumprod(1).sum(1), chance[:, 0]], 1)

    def _rates(
        self, draft: Tensor, target: Tensor, weight: Tensor, temperature: float, luck: bool
    ) -> tuple[Tensor, ...]:
        """Return acceptance, entropy and acceptance by chance of m steps [m, d].

        With ``luck`` acceptance by chance is measured against rows far away; else it equals acceptance.
        """
        rates, entropies, chances = [], [], []
        size = max(2, CHUNK // weight.shape[0])
        for q_rows, p_rows in zip(draft.split(size), target.split(size), strict=True):
            q, p = (
                self._distribution(q_rows, weight, temperature, draft=True),
                self._distribution(p_rows, weight, temperature, draft=False),
            )
            pair = pair_stats(q, p)
            unrelated = pair_stats(q, p.roll(len(p) // 2, 0)) if luck else pair
            greedy = self._draft_temperature(temperature) == 0
            rates.append(pair.target_only if greedy else pair.overlap)
            chances.append(unrelated.target_only if greedy else unrelated.overlap)
            entropies.append(pair.target_entropy)
        return torch.cat(rates), torch.cat(entropies), torch.cat(chances)

    def _distribution(self, hidden: Tensor, weight: Tensor, temperature: float, draft: bool) -> Tensor:
        """Return logits [m, V] of the distribution that the engine samples from at ``temperature`` times its own."""
        temperature = self._draft_temperature(temperature) if draft else self.sampling.temperature * temperature
        logits = (hidden @ weight.T).float() / (temperature or 1.0)
        return truncate_(logits, 1.0, self.sampling.top_p, self.sampling.top_k)

    def _draft_temperature(self, temperature: float) -> float:
        """Return the temperature of drafts; 0: the head's most likely token is drafted."""
        own = self.decoding.temperature_of_drafts
        return self.sampling.temperature * temperature if own is None else own


def _columns(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each context [N, 4] accept length and 1, entropy and 1; ``Sweep.sums`` holds their totals."""
    one = np.ones(len(numbers))
    return np.stack([numbers[:, 2], one, numbers[:, 1], one], 1)
