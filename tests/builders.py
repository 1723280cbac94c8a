"""Small models and requests for tests."""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from bebop.model.attention import ATTENTION
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead
from bebop.rollout.engine import Request
from bebop.systems import SYSTEMS
from bebop.systems.block.network import BlockDraftNetwork, BlockLengthNetwork
from bebop.systems.eagle3.network import Eagle3Network, taps_of
from bebop.systems.firp.network import PseudoStates
from bebop.systems.pad.network import PivotNetwork
from bebop.systems.pipo.network import PairModel
from bebop.trajectory import Group, SamplingParams


def letters(vocab_size: int, pair: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer with one character per token; the last token ends a text.

    ``pair``: this token is two letters, "ab", which tokenising never gives: a text does not tell its tokens.
    """
    names = ["ab" if i == pair else chr(97 + i) for i in range(vocab_size - 1)]
    vocab = {name: i for i, name in enumerate([*names, "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def tiny_policy(
    vocab_size: int = 12, *, seed: int = 0, layers: int = 2, dtype: torch.dtype = torch.float32, sharp: float = 12.0,
    with_parts: bool = True,
) -> Policy:  # fmt: skip
    """Return a random Qwen2 policy with an MTP head whose distributions are neither flat nor peaked, and differ from
    the target's.

    ``with_parts=False`` leaves out the networks of other decoding systems, which take more than half of the time; the
    weights are the same.
    """
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=vocab_size - 1, pad_token_id=None, initializer_range=0.2, attn_implementation=ATTENTION,
    )  # fmt: skip
    backbone = Qwen2ForCausalLM(config).to(dtype).eval()
    head = MTPHead(backbone).eval()
    with torch.no_grad():
        backbone.lm_head.weight.normal_(0, sharp / 32)
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.25)
    policy = Policy(backbone=backbone, tokenizer=letters(vocab_size), mtp=head, layout="mimo")
    if not with_parts:
        return policy
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pilot = BlockLengthNetwork(inputs=vocab_size, candidates=(1, 2, 3, 5), default=3).requires_grad_(False).eval()
        pivot = PivotNetwork(size=32, layer=layers - 1, inner=8, middle=8).eval()
        firp = PseudoStates(hidden_size=32, layers=(1, 1, 1, layers, layers)).requires_grad_(False).eval()
        for matrix in firp.parameters():
            matrix.add_(0.1 * torch.randn(32, 32))
    policy.draft = tiny_draft(vocab_size, seed=seed + 1, dtype=dtype, sharp=sharp)
    parts = {"block": tiny_block(layers).to(dtype), "block_length": pilot.to(dtype), "pivot": pivot}
    parts["firp"] = firp.to(dtype)
    parts["eagle3"] = tiny_eagle3(vocab_size, layers).to(dtype)
    policy.parts |= parts
    policy.parts["pipo"] = tiny_pairs(policy)
    return policy


def tiny_draft(vocab_size: int = 12, seed: int = 1, rows: int = 0, **settings: Any) -> Policy:
    """Return a random draft model of one layer for a tiny policy; ``rows``: of its matrices, 0: a token each."""
    with torch.random.fork_rng(devices=[]):
        draft = tiny_policy(rows or vocab_size, seed=seed, layers=1, with_parts=False, **settings)
    draft.tokenizer, draft.mtp = letters(vocab_size), None
    return draft


def needs_more(system: str) -> bool:
    """Return whether a system needs more than a model with an MTP head: trained parts, or a draft model."""
    return bool(SYSTEMS[system].needs or SYSTEMS[system].separate)


def bare_policy(vocab_size: int = 12, **settings: Any) -> Policy:
    """Return a ``tiny_policy`` of the same weights without parts, which takes less than half of the time."""
    return tiny_policy(vocab_size, with_parts=False, **settings)


def tiny_block(layers: int = 2, seed: int = 6) -> BlockDraftNetwork:
    """A random block drafter for a tiny policy of so many layers; its drafts depend on context and slots."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        block = BlockDraftNetwork(
            hidden_size=32, intermediate_size=48, heads=4, kv_heads=2, head_dim=8, taps=(0, layers - 1), block=4
        )
        for parameter in block.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.25)
        block.mask.normal_(0, 0.25)
    return block.requires_grad_(False).eval()


def tiny_eagle3(vocab_size: int = 12, layers: int = 2, seed: int = 8, drafted: Sequence[int] = ()) -> Eagle3Network:
    """A random EAGLE-3 drafter for a tiny policy, which drafts all tokens but the second and the last.

    ``drafted``: the draft vocabulary, in place of that one.
    """
    own = torch.tensor([*drafted] or [token for token in range(vocab_size - 1) if token != 1])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        network = Eagle3Network(
            hidden_size=32, intermediate_size=48, heads=4, kv_heads=2, head_dim=8, vocab_size=vocab_size,
            draft_vocab_size=len(own), taps=taps_of(layers), rope={"rope_type": "default", "rope_theta": 10_000.0},
            max_positions=512,
        )  # fmt: skip
        for parameter in network.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.25)
        network.choose(own)
    return network.requires_grad_(False).eval()


def tiny_pairs(policy: Policy, seed: int = 7) -> PairModel:
    """A random pair network for a tiny policy, with pad token 0; what it predicts depends on both tokens of a pair."""
    backbone = {**policy.backbone.config.to_diff_dict(), "model_type": policy.backbone.config.model_type}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        pairs = PairModel(backbone=backbone, pad=0)
        for parameter in pairs.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.25)
    return pairs.to(policy.backbone.dtype).requires_grad_(False).eval()


def requests(prompts: Sequence[Sequence[int]], **params: object) -> list[Request]:
    """One request a prompt, seeds counting up from ``seed``."""
    seed = int(params.pop("seed", 0))  # type: ignore[call-overload]
    return [
        Request(id=i, token_ids=tuple(p), params=SamplingParams(seed=seed + i, **params))  # type: ignore[arg-type]
        for i, p in enumerate(prompts)
    ]


def alone(system: str) -> dict[str, bool]:
    """Options under which an answer depends on its own request alone, whoever is decoded beside it."""
    return {"siblings": False} if SYSTEMS[system].history else {}


def oldest_version(group: Group) -> int:
    """The first weight version that any of its tokens came from."""
    return min(int(t.completion.versions.min()) for t in group.trajectories)
