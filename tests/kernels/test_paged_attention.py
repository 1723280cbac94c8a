"""Attention over pages: the Triton kernel against the reference in fp64, which is held against plain attention."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels import paged_attention
from bebop.kernels.paged_attention import reference
from bebop.model import lean
from bebop.rollout.torch_engine import generate
from tests.builders import requests, tiny_policy
from tests.cases import slow_but
from tests.kernels.rounding import to_nearest
from tests.rollout.test_conformance import engine
from tests.test_on_a_gpu import agrees

paged = pytest.importorskip("bebop.kernels.paged_attention_triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on the CPU the kernel runs in Triton's interpreter
# Of numbers of order 1; in bf16 the weights of a softmax are rounded too, by 2 ** -9 of a share each.
CLOSE = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
GPU = pytest.mark.gpu
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patched_once", "nearest")]


@pytest.fixture(scope="module")
def nearest() -> Iterator[None]:
    with to_nearest():
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pass over rows whose lengths are given."""

    lengths: tuple[int, ...]  # entries of each row before its queries
    heads: tuple[int, int] = (4, 2)
    width: int = 3  # queries of a row
    size: int = 16
    page: int = 16
    dtype: torch.dtype = torch.float32
    mask: str = "chain"  # or block: all see all; or tree
    nodes: int = 0  # of a tree; 0: ``width``
    splits: int = 1
    shared: int = 0  # pages that all rows begin with

    def inputs(self) -> dict[str, Any]:
        """Return arguments of ``paged_attention``; NaN is in all entries that no query sees."""
        numbers = torch.Generator().manual_seed(sum(self.lengths) + self.width)
        batch, nodes = len(self.lengths), self.nodes or self.width
        firsts = torch.tensor(self.lengths)
        used = max(self.lengths) + max(self.width, nodes)
        columns = -(-used // self.page) + 1  # a page more than is looked at
        table = torch.randperm(batch * columns + 2, generator=numbers)[: batch * columns].view(batch, columns)
        table[:, : self.shared] = table[0, : self.shared]
        steps, ways, seen = torch.arange(self.width), None, firsts + self.width
        entries = firsts[:, None] + steps
        if self.mask == "block":
            entries = (entries[:, -1:]).expand(-1, self.width)
        if self.mask == "tree":
            ways = torch.rand(batch, self.width, nodes, generator=numbers) < 0.5
            ways[:, steps, steps + nodes - self.width] = True
            entries, seen = firsts[:, None].expand(-1, self.width), firsts + nodes
        shape = (batch * columns + 2, self.heads[1], self.page, self.size)
        stores = [torch.full(shape, torch.nan) for _ in range(2)]
        for row, length in enumerate(seen.tolist()):
            for store in stores:
                fresh = torch.randn(self.heads[1], length, self.size, generator=numbers)
                for entry in range(length):
                    store[table[row, entry // self.page], :, entry % self.page] = fresh[:, entry]
        # As the lean pass has them: token by token in memory, keys and values between queries.
        made = torch.randn(batch, self.width, sum(self.heads), self.size, generator=numbers)
        query = made.to(self.dtype).transpose(1, 2)[:, : self.heads[0]]
        keys, values = (store.to(self.dtype) for store in stores)
        given = {"query": query, "keys": keys, "values": values, "table": table, "entries": entries, "ways": ways}
        return given | {"used": used, "scaling": self.size**-0.5}


def exact(given: dict[str, Any]) -> Tensor:
    """The reference in fp64; what no query sees is 0 there."""
    wide = {name: given[name].double().nan_to_num() for name in ("query", "keys", "values")}
    return reference(**given | wide)


def computed(given: dict[str, Any], splits: int = 0) -> Tensor:
    moved = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in given.items()}
    out: Tensor = paged.launch(**moved, splits=splits)
    return out.cpu()


def test_the_reference_is_plain_attention_over_each_rows_own_entries() -> None:
    for mask in ("chain", "block", "tree"):
        case = Case(lengths=(9, 20), heads=(4, 2), mask=mask, dtype=torch.float64, nodes=5 if mask == "tree" else 0)
        given = case.inputs()
        found = exact(given)
        for row, length in enumerate(case.lengths):
            pages = given["table"][row]
            keys, values = (
                store[pages].transpose(0, 1).flatten(1, 2).nan_to_num() for store in (given["keys"], given["values"])
            )
            for query, head in product(range(case.width), range(4)):
                entries = [*range(length)]
                if mask == "tree":
                    entries += [length + node for node in range(5) if given["ways"][row, query, node]]
                else:
                    entries = [*range(int(given["entries"][row, query]) + 1)]
                scores = keys[head // 2, entries] @ given["query"][row, head, query] * given["scaling"]
                wanted = scores.softmax(0) @ values[head // 2, entries]
                torch.testing.assert_close(found[row, query, head], wanted)


QUICK = [
    Case(lengths=(0, 13, 14, 45), splits=2),
    Case(lengths=(20, 3), heads=(8, 1), width=1, size=12, dtype=torch.bfloat16),
    Case(lengths=(50, 0, 21), heads=(4, 4), width=4, mask="tree", splits=4, shared=1),
    Case(lengths=(40, 17), heads=(8, 2), width=5, mask="block", page=32, splits=2, dtype=torch.float16),
    Case(lengths=(18, 3), heads=(4, 2), width=2, mask="tree", nodes=7),
]
FURTHER = [
    *(replace(one, dtype=dtype) for one in QUICK for dtype in CLOSE if dtype != one.dtype),
    *(Case(lengths=(33, 0), heads=(heads, 2), splits=2) for heads in (2, 8, 16)),
    *(Case(lengths=(90, 5, 31), mask=mask, splits=3, page=48, size=24, width=8) for mask in ("chain", "block", "tree")),
    Case(lengths=(3, 30), heads=(8, 1), width=40, splits=2),  # five tiles of rows
    Case(lengths=(0, 7), width=64, mask="tree", heads=(1, 1)),
]
# Heads of SmolLM2 and of Qwen3-1.7B, lengths of one page and of many.
REAL = [
    Case(lengths=lengths, heads=heads, size=size, width=width, page=64, dtype=dtype, splits=0, mask=mask)
    for heads, size in (((9, 3), 64), ((16, 8), 128), ((8, 2), 256), ((4, 4), 96))
    for dtype in CLOSE
    for lengths, width, mask in (((4000,), 4, "chain"), ((0, 700, 63, 64, 65), 4, "tree"), ((130, 9), 16, "block"))
] + [Case(lengths=(100, 0), heads=(16, 8), size=128, width=300, page=64, dtype=torch.bfloat16, splits=0)]


@pytest.mark.parametrize("case", [*slow_but(QUICK, QUICK + FURTHER), *(pytest.param(one, marks=GPU) for one in REAL)])
def test_the_kernel_sees_what_the_reference_sees(case: Case) -> None:
    """Uneven lengths, pages in any order, all masks; NaN lies behind the last entry of each row."""
    given = case.inputs()
    found, wanted = computed(given, case.splits), exact(given)
    assert found.dtype == case.dtype and found.shape == wanted.shape
    close = {"rtol": 0, "atol": CLOSE[case.dtype]}
    torch.testing.assert_close(found.double(), wanted, **close)
    blind = given | {"entries": given["entries"] - 1}  # one entry less, of thousands: a difference that is no rounding
    if min(case.lengths) and case.mask != "tree":
        assert (found.double() - exact(blind)).abs().max() > 4 * (found.double() - wanted).abs().max()


@pytest.mark.parametrize("device", [DEVICE])
def test_spans_add_up_and_rows_do_not_depend_on_others(device: str) -> None:
    """A row alone has the same bits where spans are as long; other spans change the rounding alone."""
    case = Case(lengths=(7, 100, 40), heads=(4, 1), width=2)
    given = case.inputs()
    whole = {splits: computed(given, splits) for splits in (1, 3, 8)}
    for splits, found in whole.items():
        torch.testing.assert_close(found, whole[1], rtol=0, atol=CLOSE[case.dtype])
        alone = given | {name: given[name][1:2] for name in ("query", "table", "entries")}
        assert torch.equal(computed(alone, splits), found[1:2])
    assert not paged._counters(torch.zeros((), device=device).device).any(), "the next launch starts from 0"


def test_a_cache_of_slots_is_one_of_large_pages() -> None:
    """A slot of 48 entries, in tiles of 16; keys and values are views of a wider store."""
    case = Case(lengths=(30, 4), page=48, width=2)
    given = case.inputs()
    given["keys"] = torch.cat([given["keys"], given["keys"]], 1)[:, :2]
    torch.testing.assert_close(computed(given).double(), exact(given), rtol=0, atol=CLOSE[case.dtype])


@pytest.mark.slow  # a whole engine in the interpreter
@pytest.mark.parametrize("system", ["bebop", "bebop_tree", "block"])
def test_an_engine_decodes_with_the_kernels_what_it_decodes_without(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a layer all but its products is done by kernels; keys and values lie in pages that a group shares."""
    asked = requests([[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1]], max_new_tokens=14)
    wanted = generate(engine(tiny_policy(seed=9), system), asked)
    for module in (lean, paged_attention):
        monkeypatch.setattr(module, "compiled", lambda *_: True)
    launched: list[Any] = []
    own = paged.launch
    monkeypatch.setattr(paged, "launch", lambda *given: launched.append(given[-1]) or own(*given))
    agrees(generate(engine(tiny_policy(seed=9), system, paged=True), asked), wanted, but=1)
    assert any(ways is not None for ways in launched) == (system != "bebop")


def test_what_it_does_not_take() -> None:
    with pytest.raises(UserError, match=r"float32, bfloat16 and float16, not in torch\.float64"):
        computed(Case(lengths=(3,), dtype=torch.float64).inputs())
    with pytest.raises(AssertionError, match="a multiple of 16 entries"):
        computed(Case(lengths=(3,), page=8).inputs())


@pytest.mark.parametrize(("rows", "entries", "splits"), [(8, 4096, 16), (8, 300, 4), (8, 128, 1), (256, 4096, 1)])
def test_entries_are_split_until_each_processor_has_a_program(
    rows: int, entries: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "_processors", lambda _: 132)
    assert paged._splits(rows, entries, torch.device("cpu")) == splits
