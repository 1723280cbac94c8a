import copy
import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bebop.errors import UserError
from bebop.model import attention as own_attention
from bebop.model.attention import ATTENTION, AttentionContext, CausalContext, PackedContext, SlotContext, attention
from bebop.model.backbone import Policy
from bebop.model.paged_cache import PagedContext
from bebop.model.ragged_attention import Ragged
from tests.builders import letters, tiny_policy

LENGTHS = [5, 1, 9, 3]


def llama_policy() -> Policy:
    """Another family: no biases, head size of its own, three query heads a key-value head."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=12, hidden_size=36, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2, bos_token_id=None,
        eos_token_id=11, attn_implementation=ATTENTION,
    )  # fmt: skip
    return Policy(backbone=LlamaForCausalLM(config).eval(), tokenizer=letters(12), mtp=None, layout="mimo")


@pytest.fixture(params=[tiny_policy, llama_policy], ids=["qwen2", "llama"], scope="module")
def policy(request: pytest.FixtureRequest) -> Policy:
    return request.param()


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 12, (n,), generator=generator) for n in LENGTHS]


def stock_logits(policy: Policy, ids: Tensor) -> Tensor:
    """Logits [T, V] of Hugging Face's own eager attention."""
    config = copy.deepcopy(policy.backbone.config)  # from_config writes its attention into what it is given
    stock = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    stock.load_state_dict(policy.backbone.state_dict())
    return stock.eval()(input_ids=ids[None], use_cache=False).logits[0]


def logits(policy: Policy, ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
    return policy.logits(policy.hidden(ids, positions, context))


def packed(policy: Policy, lengths: list[int]) -> Tensor:
    """Logits [N, V] of all rows end to end, told that they have ``lengths``."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return logits(policy, torch.cat(rows())[None], positions, PackedContext(torch.tensor(lengths)))[0]


@torch.no_grad()
def test_packed_rows_equal_rows_alone_and_stock_attention(policy: Policy) -> None:
    together = packed(policy, LENGTHS).split(LENGTHS)
    for row, out in zip(rows(), together, strict=True):
        alone = logits(policy, row[None], torch.arange(len(row))[None], PackedContext(torch.tensor([len(row)])))[0]
        assert torch.allclose(out, alone, atol=1e-5, rtol=1e-5)
        assert torch.allclose(out, stock_logits(policy, row), atol=1e-5, rtol=1e-5)
    broken = packed(policy, [6, 9, 3]).split(LENGTHS)  # the first two rows taken for one: only the second row differs
    differs = [not torch.allclose(a, b, atol=1e-3) for a, b in zip(broken, together, strict=True)]
    assert differs == [False, True, False, False]


@torch.no_grad()
def test_padded_rows_equal_stock_attention(policy: Policy) -> None:
    width = max(LENGTHS)
    ids = torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=7) for row in rows()])
    out = logits(policy, ids, torch.arange(width).expand(len(ids), -1), CausalContext())
    for row, own in zip(rows(), out, strict=True):
        assert torch.allclose(own[: len(row)], stock_logits(policy, row), atol=1e-5, rtol=1e-5)


def slot_context(policy: Policy, slots: int, length: int = 24) -> SlotContext:
    config, like = policy.backbone.config, policy.embed(torch.zeros(1, dtype=torch.long))
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return SlotContext(config.num_hidden_layers, slots, length, config.num_key_value_heads, size, like)


def incremental(policy: Policy, late: int = 0) -> Tensor:
    """Logits [3, 14, V] of one text in three slots, fed 4 + 1 + 3 + ... tokens; ``late`` shifts later positions."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 12, (3, 14), generator=generator)
    context, out, start = slot_context(policy, 3), [], 0
    for step, width in enumerate((4, 1, 3, 1, 5)):
        positions = (torch.arange(start, start + width) + (late if step else 0)).expand(3, width)
        if step == 2:  # a rejected draft: written first, then overwritten
            context.place(positions, 24)
            policy.hidden((ids[:, start : start + width] + 1) % 12, positions, context)
        context.place(positions, 24 if step % 2 else start + width + late)
        out.append(logits(policy, ids[:, start : start + width], positions, context))
        start += width
    full = torch.stack([stock_logits(policy, row) for row in ids])
    return torch.cat(out, 1) - full


@torch.no_grad()
def test_slots_fed_bit_by_bit_equal_one_pass(policy: Policy) -> None:
    assert incremental(policy).abs().max() < 1e-5
    assert incremental(policy, late=1).abs().max() > 1e-3  # an entry that was never written is looked at


@torch.no_grad()
def test_rows_of_their_own_length_and_copied_slots(policy: Policy) -> None:
    texts, context = rows(), slot_context(policy, 6)
    for slot, row in enumerate(texts):
        if len(row) > 1:
            positions = torch.arange(len(row) - 1)[None]
            with context.at(slot):
                context.place(positions, len(row) - 1)
                policy.hidden(row[None, :-1], positions, context)
    context.copy_slot(2, 2, 6, len(texts[2]) - 1)  # slots 2 to 5 all hold text 2 now, and text 3 is overwritten
    held = [texts[i] for i in (0, 1, 2, 2, 2, 2)]
    positions = torch.tensor([[len(row) - 1] for row in held])
    context.place(positions, 24)
    out = logits(policy, torch.stack([row[-1:] for row in held]), positions, context)
    for row, own in zip(held, out, strict=True):
        assert torch.allclose(own[-1], stock_logits(policy, row)[-1], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_kernels_store_where_attend_writes() -> None:
    """One after the other, in slots that do not begin at 0; entries of equal rows then are those of ``attend``."""
    own, other = (SlotContext(2, 4, 16, 2, 8, torch.zeros(())) for _ in range(2))
    for entries in (torch.tensor([[0, 1], [5, 6]]), torch.tensor([[3, 9], [7, 8]])):
        query, key, value = (torch.randn(2, 2, 2, 8) for _ in range(3))
        for context in (own, other):
            context.first_slot = 1
            context.place(entries, 16)
        wanted = own.attend(1, query, key, value, 0.5)
        found = other.stores(1)
        assert found is not None
        stores, table, places = found
        for store, new in zip(stores, (key, value), strict=True):
            store[table.gather(1, places // 16), :, places % 16] = new.transpose(1, 2)
        assert torch.equal(other.keys, own.keys) and torch.equal(other.values, own.values)
        assert torch.equal(other.attend_stored(1, query, 0.5), wanted)


@torch.no_grad()
def test_pages_are_stored_to_and_read_as_slots_are() -> None:
    """By ``stores`` and ``attend_stored``, as kernels do: two chains, rows end to end, some nodes of a tree."""
    torch.manual_seed(0)
    slots = SlotContext(2, 4, 32, 2, 8, torch.zeros(()))
    table = 1 + torch.randperm(8).view(4, 2)
    pages = PagedContext(2, table, 9, 16, 2, 8, torch.zeros(()))
    chain, ragged = torch.tensor([[0, 1], [14, 15], [15, 16]]), Ragged.of(torch.tensor([2, 1, 2]), 2)
    first = torch.tensor([3, 15, 9])
    ways = torch.tensor([[True, False, True, False], [False, True, False, True]]).expand(3, -1, -1)
    nodes = first[:, None] + torch.tensor([2, 3])
    passes: list[tuple[Tensor, dict[str, Any]]] = [
        (chain, {}), (chain + 1, {}), (nodes, {"tree": (first, ways)}),
        *((chain + more, {"ragged": ragged}) for more in (5, 8)),
    ]  # fmt: skip
    # What was never written may be looked at, but not seen: it is alike in both.
    for entries, given in passes:
        for context in (slots, pages):
            context.first_slot = 1
            context.place(entries, 32, **given)
        query, key, value = (torch.randn(3, heads, 2, 8) for heads in (4, 2, 2))
        if "ragged" in given:
            query, key, value = (ragged.packed(x.transpose(1, 2)).transpose(1, 2) for x in (query, key, value))
        wanted = slots.attend(1, query, key, value, 0.5)
        stores, rows, places = pages.stores(1)
        by_token = [x.transpose(1, 2).flatten(0, 1) for x in (key, value)]
        each = rows if "ragged" in given else rows.repeat_interleave(2, 0)
        for store, new in zip(stores, by_token, strict=True):
            store[each.gather(1, places.reshape(-1, 1) // 16)[:, 0], :, places.flatten() % 16] = new
        asked = query[0].transpose(0, 1) if "ragged" in given else query
        found = pages.attend_stored(1, asked, 0.5)
        torch.testing.assert_close(found[None] if "ragged" in given else found, wanted)


@torch.no_grad()
def test_a_tree_of_drafts_is_its_chains(policy: Policy) -> None:
    """Siblings share a position and have an entry each; every node sees the text before and its own ancestors."""
    text, context = torch.tensor([3, 1, 4, 1]), slot_context(policy, 1)
    parents, nodes = [-1, -1, 0, 1, 2], torch.tensor([5, 7, 2, 2, 8])  # 5 and 7 follow the text; 2 follows either; ...
    size = len(text)
    context.place(torch.arange(size)[None], size)
    policy.hidden(text[None], torch.arange(size)[None], context)
    paths = [[node] for node in range(len(nodes))]
    for node, path in enumerate(paths):
        path[:0] = paths[parents[node]] if parents[node] >= 0 else []
    seen = torch.zeros(1, len(nodes), 24, dtype=torch.bool)
    seen[..., :size] = True
    for node, path in enumerate(paths):
        seen[0, node, [size + ancestor for ancestor in path]] = True
    entries = size + torch.arange(len(nodes))[None]
    positions = torch.tensor([[size + len(path) - 1 for path in paths]])
    context.place(entries, 24, (torch.tensor([size]), seen[..., size : size + len(nodes)]))
    tree = logits(policy, nodes[None], positions, context)[0]
    for node, path in enumerate(paths):
        assert torch.allclose(
            tree[node], stock_logits(policy, torch.cat([text, nodes[path]]))[-1], atol=1e-5, rtol=1e-5
        )
    context.place(entries, 24)  # as a chain, a node would see the branches beside it
    assert not torch.allclose(tree, logits(policy, nodes[None], positions, context)[0], atol=1e-3)


@pytest.mark.parametrize("setting", ["sliding_window", "softcap"])
def test_attention_of_another_kind_is_refused(setting: str) -> None:
    state = torch.zeros(1, 1, 1, 1)
    with pytest.raises(UserError, match=f"{setting}=7") as error:
        attention(torch.nn.Identity(), state, state, state, None, context=CausalContext(), scaling=1.0, **{setting: 7})
    assert "\n" not in str(error.value)


def test_what_flash_attention_is_told_stands_for_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on a GPU alone, where ``test_on_a_gpu`` compares numbers. Here its signature is PyTorch's own."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, sum(LENGTHS), 8, generator=generator) for heads in (4, 2, 2))

    @functools.wraps(varlen_attn)
    def rows_apart(*tensors: Any, **settings: Any) -> Tensor:
        given = inspect.signature(varlen_attn).bind(*tensors, **settings).arguments
        assert given["window_size"] == (-1, 0) and given["max_q"] == given["max_k"] == max(LENGTHS)
        assert given["cu_seq_q"].dtype == torch.int32 and given["enable_gqa"]
        cuts = given["cu_seq_q"].tolist()
        out = []
        for start, end in zip(cuts, given["cu_seq_k"].tolist()[1:], strict=False):
            q, k, v = (given[name][start:end].transpose(0, 1) for name in ("query", "key", "value"))
            row = scaled_dot_product_attention(q, k, v, is_causal=True, scale=given["scale"], enable_gqa=True)
            out.append(row.transpose(0, 1))
        return torch.cat(out)

    monkeypatch.setattr(own_attention, "flash_varlen", lambda: rows_apart)
    context = PackedContext(torch.tensor(LENGTHS))
    flat = (x[0].transpose(0, 1) for x in (query, key, value))
    torch.testing.assert_close(context._unpadded(*flat, 0.3), context.attend(0, query, key, value, 0.3)[0])
