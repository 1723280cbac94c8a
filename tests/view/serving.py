"""The viewer's server beside a test: asked in this process, or by a browser."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from bebop.run_dir.checkpoints import Store
from bebop.run_dir.folder import RunFolder
from bebop.view.folders import folders
from bebop.view.server import application


def ask(paths: Sequence[Path], *addresses: str, **options: Any) -> list[tuple[int, Any]]:
    """Status and body (JSON, else text) of each address."""

    async def asking() -> list[tuple[int, Any]]:
        answers = []
        async with TestClient(TestServer(application(folders(paths)))) as client:
            for address in addresses:
                async with client.get(address, **options) as got:
                    body = await (got.json() if got.content_type == "application/json" else got.text())
                    answers.append((got.status, body))
        return answers

    return asyncio.run(asking())


@contextmanager
def served(paths: Sequence[Path]) -> Iterator[str]:
    """The address of a server in a thread of its own."""
    loop, ready, where = asyncio.new_event_loop(), threading.Event(), []

    async def start() -> web.AppRunner:
        runner = web.AppRunner(application(folders(paths)), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        where.append(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        ready.set()
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30)
    try:
        yield where[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """A folder as a job holds it that has just started there."""
    folder = RunFolder(path, "runtime.dir", False, Store(path / "checkpoints", "step"))
    folder.open()
    try:
        yield
    finally:
        folder.close()
