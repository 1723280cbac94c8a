"""Training of an MTP head: its own parameters, optimizer, learning rate and gradient norm; the backbone is a constant.

It is used before RL (``bebop.adapt``) and beside it (co-training), over any ``HeadBackend``.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bebop.config.job import HeadConfig
from bebop.errors import UserError
from bebop.trainer.chains import ChainRows, KnownRow, TokenRow, chain_rows, known_chains, spaced
from bebop.trainer.head_backend import HeadBackend
from bebop.trainer.objectives import Objective, make_objective
from bebop.trainer.optim import GuardedAdamW, State, load_optimizer_state, optimizer_state, warm_up

MicroBatch = tuple[ChainRows, Tensor | None]  # with the hidden states [B, L, d], where they are known


class HeadTrainer:
    """Trains a head on rows of text; every rank of its backend makes the same calls."""

    def __init__(self, backend: HeadBackend, config: HeadConfig, setting: str = "head.lr") -> None:
        """Train the backend's head, which changes in place; ``setting`` names its learning rate in messages."""
        self.backend, self.config = backend, config
        self.version = 0  # finished updates
        self.optimizer = GuardedAdamW(
            backend.named, config, setting=setting, loss="the loss of the MTP head", causes="weights"
        )

    def update(
        self,
        rows: Sequence[TokenRow],
        objective: str | Objective | None = None,
        hidden: Sequence[Tensor] | None = None,
        every: int = 1,
    ) -> dict[str, float]:
        """Take one optimizer step on the mean loss of all rows (of all ranks, which get the same rows).

        Args:
            rows: prompts with completions.
            objective: its name in ``OBJECTIVES``, or one of another kind; None: the configuration's.
            hidden: the backbone's states [L, d] of each row, if known; else they are computed.
            every: only each ``every``-th chain of a row (see ``spaced``), other chains at each update.

        Returns:
            head/loss, head/grad_norm (before clipping), head/lr, head/skipped.

        Raises:
            UserError: fewer rows than ranks, no chain in any row, or the third gradient in a row that is not finite.
        """
        parts = self._micro_batches([len(row.token_ids) for row in rows])
        chosen = objective if isinstance(objective, Objective) else make_objective(objective or self.config.objective)
        total = spaced(chain_rows(rows, self.config.depth), every, self.version).count(chosen.per)
        return self._learn(self._batches(rows, parts, hidden, every), total, chosen)

    def _batches(
        self, rows: Sequence[TokenRow], parts: Sequence[Sequence[int]], hidden: Sequence[Tensor] | None, every: int
    ) -> Iterator[MicroBatch]:
        """Yield the rows of each part side by side, one part at a time."""
        for part in parts:
            known = None if hidden is None else pad_sequence([hidden[i] for i in part], batch_first=True)
            layout = chain_rows([rows[i] for i in part], self.config.depth, self.backend.device)
            yield spaced(layout, every, self.version), known

    def update_share(self, rows: Sequence[KnownRow]) -> dict[str, float]:
        """Update as ``update`` does, with this rank's own rows; a rank may have none."""
        objective = make_objective(self.config.objective)
        parts = self._fitting(rows)
        layouts = [known_chains(part, self.config.depth) for part in parts]
        count = sum(layout.count(objective.per) for layout in layouts)
        total = int(self.backend.total(torch.tensor(count, device=self.backend.device)))
        hidden = (pad_sequence([row.hidden for row in part], batch_first=True) for part in parts)
        return self._learn(zip(layouts, hidden, strict=True), max(1, total), objective)

    def _learn(self, batches: Iterable[MicroBatch], total: int, objective: Objective) -> dict[str, float]:
        """Compute gradients of the micro-batches, each weighted by its share of ``total``, and take a step."""
        if total == 0:
            raise UserError(
                "no completion in these rows is long enough to draft a token of: completions of 1 token or more"
            )
        loss = torch.zeros((), device=self.backend.device)
        with self.backend.updating():
            for rows, hidden in batches:
                value = self.backend.loss(rows, objective.loss, hidden)
                if value is not None:
                    value = value * (rows.count(objective.per) / total)
                    (value * self.backend.scale).backward()
                    loss += value.detach()
        return self.step(float(self.backend.total(loss)))

    def step(self, loss: float, scale: float = 1.0) -> dict[str, float]:
        """Take the guarded step on the gradients of all ranks, times ``scale``; return and raise as ``update`` does."""
        norm = self.backend.reduce(scale)
        numbers = self.optimizer.guarded_step(warm_up(self.config, self.version), norm)
        if not numbers["skipped"]:
            self.backend.stepped()
        self.version += 1
        return {"head/loss": loss, **{f"head/{name}": value for name, value in numbers.items()}}

    def _fitting(self, rows: Sequence[KnownRow]) -> list[list[KnownRow]]:
        """Return the rows by length, in micro-batches of at most ``max_tokens`` tokens with padding."""
        parts: list[list[KnownRow]] = []
        for row in sorted(rows, key=lambda row: -len(row.token_ids)):
            if parts and (len(parts[-1]) + 1) * len(parts[-1][0].token_ids) <= self.config.max_tokens:
                parts[-1].append(row)
            else:
                parts.append([row])
        return parts

    def _micro_batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the numbers of this rank's rows, in micro-batches of at most ``max_tokens`` tokens with padding.

        Every rank gets as many micro-batches.
        """
        rank, world = self.backend.rank, self.backend.world
        if len(lengths) < world:
            raise UserError(f"{len(lengths)} rows cannot be split over {world} ranks: give more rows a step")
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        shares = [order[r::world] for r in range(world)]
        fit = max(1, self.config.max_tokens // max(lengths))
        count = min(len(shares[-1]), math.ceil(len(shares[0]) / fit))
        ends = [math.ceil(len(shares[rank]) * i / count) for i in range(count + 1)]
        return [shares[rank][a:b] for a, b in pairwise(ends)]

    def weights(self) -> dict[str, Tensor]:
        """Return the head's full fp32 weights on the CPU, by the names of ``MTPHead``; all ranks take part."""
        return self.backend.weights()

    def state_dict(self) -> State:
        """Return the state for an exact resume, unsharded: any number of ranks can load it."""
        return {"version": self.version, **optimizer_state(self.optimizer)}

    def load_state_dict(self, state: State) -> None:
        """Load a ``state_dict``; raise ``UserError`` if it belongs to another head."""
        load_optimizer_state(self.optimizer, state, "head")
        self.version = state["version"]
