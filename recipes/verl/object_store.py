"""A place in the job where the trainer leaves a reference to its weights; knows neither torch nor verl."""

import asyncio
from typing import Any


class ObjectStore:
    """One item at a time; ``get`` waits for it."""

    def __init__(self) -> None:
        self._full = asyncio.Event()
        self._item: list[Any] = []

    async def put(self, item: list[Any]) -> None:
        """Leave an item: a list, so that references in it stay references."""
        self._item = item
        self._full.set()

    async def get(self) -> list[Any]:
        """The item, as soon as it is there."""
        await self._full.wait()
        return self._item

    async def clear(self) -> None:
        """Throw the item away."""
        self._item = []
        self._full.clear()
