"""What is on its way to one rollout worker: the newest weights, how to decode, and prompts; one after another.

Workers do not wait for each other: each has a lane of its own, and all take the same reference to the weights. (Behind
Ray that is a tree of a kind already: a node fetches an object once, from any node that has it by then, and the workers
of a node share the copy.)
"""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from bebop.config import DecodingConfig
from bebop.protocols import Assignment, DamagedWeights, Worker, WorkerDied

log = logging.getLogger(__name__)
MOST_SENDS = 3  # of weights that arrive damaged


@dataclass(slots=True, kw_only=True)
class Orders:
    """What all workers should have by now."""

    decoding: DecodingConfig
    published: int = 0  # how often weights were published
    weights: Any = None  # those of the last time
    version: int = 0  # theirs


@dataclass(slots=True, kw_only=True)
class Lane:
    """One worker, what it was sent, and what it is to be sent."""

    number: int
    worker: Worker
    decoding: DecodingConfig  # what it was told last, or started with
    sent: int = 0  # the newest publication that it has; 0: none
    seen: int = 0  # number of its newest report
    # To be asked for, each with the publication that must have arrived before.
    outbox: list[tuple[int, Assignment]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)  # the newest weights, unless it is being replaced
    away: bool = False  # it is being replaced

    def leave(self) -> None:
        """Its worker is gone: nothing is on its way any more, and nobody needs to wait."""
        self.outbox, self.away = [], True
        self.arrived.set()

    def renew(self, decoding: DecodingConfig) -> None:
        """Its worker was replaced, by one that started with ``decoding``."""
        self.decoding, self.sent, self.seen, self.away = decoding, 0, 0, False
        self.news.set()

    async def send(self, orders: Orders) -> None:
        """Bring the worker what is there for it, for ever; ``WorkerDied`` if it is gone.

        Weights that a newer publication overtakes before they are on their way are left out. Prompts wait for those
        that were the newest when they were handed out, and not for all that came since: a worker that takes in weights
        more slowly than they are published still gets its prompts.
        """
        while True:
            if self.sent < orders.published:
                await self._send_weights(orders)
            if self.decoding != orders.decoding:
                decoding = orders.decoding
                await self.worker.configure(decoding)
                self.decoding = decoding
            ready = [assignment for needed, assignment in self.outbox if needed <= self.sent]
            if ready:
                self.outbox = [(needed, later) for needed, later in self.outbox if needed > self.sent]
                await self.worker.submit(ready)
            if self.sent == orders.published:
                self.arrived.set()
                if self.decoding == orders.decoding and not self.outbox:
                    self.news.clear()
                    await self.news.wait()

    async def _send_weights(self, orders: Orders) -> None:
        """The newest weights; again if they arrive damaged, which the worker notices and refuses."""
        for left in reversed(range(MOST_SENDS)):
            published, weights, version = orders.published, orders.weights, orders.version
            try:
                await self.worker.set_weights(weights, version)
            except DamagedWeights as damage:
                if not left:
                    raise WorkerDied(
                        f"weights of version {version} arrived {MOST_SENDS} times damaged: {damage}"
                    ) from damage
                log.warning(
                    "rollout worker %d refuses weights of version %d, %s: sent again", self.number, version, damage
                )
                continue
            self.sent = published
            return
