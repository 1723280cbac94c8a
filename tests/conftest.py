"""Triton's interpreter where there is no GPU: its variable must be set before anything imports triton.

Here and not beside the kernels' tests: folders are collected in alphabetical order, and transformers imports triton.
"""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from tests.order import longest_first

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order in which files are to begin."""
    longest_first(items)


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
