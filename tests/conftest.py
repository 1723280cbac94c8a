"""What every test process needs: Triton's interpreter, the order of the files, processor seconds, interrupts."""

import asyncio
import contextlib
import importlib
import inspect
import os
import signal
from collections.abc import Iterator

import pytest

from tests.budget import Recorder
from tests.order import longest_first


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--budget``: what ``make test`` and ``make test-slow`` pass. And ``--pages``, for a run of tests by hand."""
    parser.addoption("--budget", metavar="NAME", help="print processor seconds by folder; fail above the budget NAME")
    parser.addoption("--pages", action="store_true", help="embedded engines keep keys and values in pages")


def pytest_configure(config: pytest.Config) -> None:
    """Measure processor seconds where a budget is named; choose Triton's interpreter where there is no GPU.

    The variable has to be set before anything imports triton, as transformers does: not in the kernels' folder, since
    folders are collected in alphabetical order. A process that only starts workers runs no test and needs no torch.
    """
    if config.option.budget:
        config.pluginmanager.register(Recorder(config.option.budget), "processor-seconds")
    if hasattr(config, "workerinput") or getattr(config.option, "dist", "no") == "no":
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
            with contextlib.suppress(
                ImportError
            ):  # now, as a test that unsets the variable may be the first to import it
                importlib.import_module("triton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order in which files are to begin."""
    longest_first(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without a card, its tests are skipped."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function, in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


def _keep_in_pages(monkeypatch: pytest.MonkeyPatch, paged: bool) -> None:
    """Let embedded engines that are not told otherwise keep keys and values in pages, or in slots."""
    from bebop.rollout.torch_engine import TorchEngine

    monkeypatch.setitem(TorchEngine.__init__.__kwdefaults__, "paged", paged)


@pytest.fixture(scope="session", autouse=True)
def pages(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep the caches of all engines in pages, where ``--pages`` asks for that."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.option.pages:
            _keep_in_pages(patch, True)
        yield


@pytest.fixture
def in_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep keys and values in slots: for a test that looks for them there."""
    _keep_in_pages(monkeypatch, False)


@pytest.fixture
def in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep keys and values in pages."""
    _keep_in_pages(monkeypatch, True)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["slots", "pages"])
def paged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test twice: with keys and values in slots, and in pages."""
    _keep_in_pages(monkeypatch, request.param)
    return bool(request.param)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """An entry point that was interrupted ignores further interrupts, as its process ends; a test's goes on. A shell
    that runs tests in the background has them ignored from the start."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if handler is not None:  # None: not Python's to put back
            signal.signal(number, handler)
