"""Copies to the host, on a CPU: the same path as on a GPU, but for pinned memory and events."""

from typing import Any

import pytest
import torch

from bebop.rollout.host_copy import HostCopy, LateEntries, to_device


def test_what_is_written_later_is_not_seen() -> None:
    source = torch.arange(6).view(2, 3)
    copy = HostCopy(rows=source, column=source[:, 1])
    source.zero_()
    found = copy.get()
    assert found["rows"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["column"].tolist() == [1, 4]
    assert copy.get() is found


@pytest.mark.gpu
def test_copies_of_a_gpu_are_pinned_and_wait_for_it() -> None:
    """The device is busy when the copy begins; what it writes afterwards is not seen."""
    matrix = torch.randn(4096, 4096, device="cuda")
    product = matrix @ matrix
    copy = HostCopy(product=product, corner=product[::2, 1])
    wanted = product.cpu()
    product.zero_()
    found = copy.get()
    assert found["product"].is_pinned() and torch.equal(found["product"], wanted)
    assert torch.equal(found["corner"], wanted[::2, 1])


def test_entries_are_made_once_and_late() -> None:
    calls = []

    def make(found: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        calls.append(1)
        return [{"value": value} for value in found["values"].tolist()]

    entries = LateEntries(HostCopy(values=torch.tensor([3, 5])), 2, make)
    assert len(entries) == 2 and not calls
    assert entries[1] == {"value": 5} and [entry["value"] for entry in entries] == [3, 5] and len(calls) == 1


def test_numbers_for_a_device() -> None:
    assert to_device([4, 2], torch.device("cpu")).tolist() == [4, 2]
