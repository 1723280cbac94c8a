"""Endless stream over a finite set of questions: each once an epoch, in an order shuffled anew for each epoch."""

import random

CACHED = 4  # orders: those of neighbouring epochs, and of the replacements of long questions


class Epochs:
    """Numbers 0 ... ``count`` - 1, epoch after epoch; ``place`` is a pure function of its arguments, count and seed."""

    def __init__(self, count: int, seed: int) -> None:
        """Create a stream over ``count`` questions; ``seed`` determines the orders."""
        assert count > 0, count
        self.count, self.seed = count, seed
        self._orders: dict[tuple[int, int], list[int]] = {}

    def place(self, index: int, attempt: int = 0) -> tuple[int, int]:
        """Return the epoch, from 0, and the question of place ``index`` >= 0; other attempts shuffle differently."""
        epoch, place = divmod(index, self.count)
        return epoch, self._order(epoch, attempt)[place]

    def _order(self, epoch: int, attempt: int) -> list[int]:
        """Return the questions [count] of an epoch in order."""
        if (epoch, attempt) not in self._orders:
            if len(self._orders) >= CACHED:
                self._orders.pop(next(iter(self._orders)))
            shuffle = random.Random(f"{self.seed}/{epoch}/{attempt}")
            self._orders[epoch, attempt] = shuffle.sample(range(self.count), self.count)
        return self._orders[epoch, attempt]
