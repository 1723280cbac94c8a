"""The model as the reference: the claimed distribution, computed from the Hugging Face model's logits in fp32.

It shares no code with an engine: it uses transformers' own forward and attention, and processes the logits with its own
code in fp64. The MTP head, if the checkpoint has one, only predicts the distribution of drafts. A wrong prediction
costs statistical power and nothing else.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from bebop.certify.answers import Answer, Block, cells, make_block, narrow, seen
from bebop.certify.precision import Sensitivity
from bebop.certify.reference import LiveEngine
from bebop.config.certify import CertifyConfig
from bebop.errors import UserError
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.model.fingerprint import fingerprint
from bebop.model.parity import stock_attention
from bebop.trajectory import SamplingParams

COLUMNS = 4096  # columns of a block; a larger vocabulary has its likeliest tokens and one column for all others
TOKENS = 4096  # in a pass of the model, padding included
ELEMENTS = 1 << 24  # logits processed at a time
# Margin by which a truncation keeps more tokens, relative or in mass. In fp32 they may lie on either side of its limit:
# log-probs of SmolLM2 are off by 1e-5 in the median and 4e-5 at most. A claim too wide by so little costs nothing.
BORDER = 1e-4


def make(config: CertifyConfig, engine: LiveEngine) -> "ModelReference":
    """Load the checkpoint of ``model.path`` for the reference alone, and check it against Hugging Face's forward.

    Raises:
        UserError: see ``refuse_rounded_cuts``.
    """
    refuse_rounded_cuts(config)
    return ModelReference(load_policy(replace(config.model, dtype="float32", check=True)), dtype=config.model.dtype)


def refuse_rounded_cuts(config: CertifyConfig) -> None:
    """Raise ``UserError`` if the engine is not in float32, and its distributions are cut.

    Its rounding puts tokens near the cut on the other side than the reference's, which would look like a fault.
    """
    asked, dtype = config.sampling, config.model.dtype
    cut = next((f"sampling.{name}={value}" for name, value, whole in (
        ("top_k", asked.top_k, 0), ("top_p", asked.top_p, 1.0), ("min_p", asked.min_p, 0.0)
    ) if value != whole), None)  # fmt: skip
    if cut is not None and dtype != "float32":
        raise UserError(
            f"{cut} is not possible with model.dtype={dtype}: its rounding moves tokens across the cut, which would "
            "look like a fault; certify without a cut, or an engine in float32"
        )


class ModelReference:
    """A ``Reference`` over a policy in fp32 that has no other users."""

    name = "model"

    def __init__(self, policy: Policy, *, columns: int = COLUMNS, dtype: str = "float32") -> None:
        """Store the policy.

        Args:
            columns: the largest number of columns of a block.
            dtype: the engine's precision, whose rounding is estimated.
        """
        self.policy, self.columns, self.dtype = policy, columns, dtype
        self.gain: float | None = None  # see ``precision``; measured with the first completions

    def describe(self) -> dict[str, Any]:
        """Return version, architecture, precision and fingerprints of weights."""
        policy = self.policy
        return {
            "transformers": transformers.__version__,
            "architecture": type(policy.backbone).__name__,
            "dtype": str(policy.backbone.dtype).removeprefix("torch."),
            "target": fingerprint(dict(policy.backbone.named_parameters())),
            "head": policy.head_fingerprint() or None,
            "columns": min(self.columns, policy.vocab_size),
        }

    @torch.no_grad()
    def block(self, answers: Sequence[Answer], params: SamplingParams) -> Block:
        """Return the distributions at every position of all nonempty completions.

        Raises:
            ValueError: ``params`` is greedy: greedy completions are no draws.
        """
        if params.temperature <= 0:
            raise ValueError(
                "greedy completions are no draws from a distribution: a reference needs a temperature above 0"
            )
        answers = [answer for answer in answers if len(answer.token_ids)]
        vocabulary = self.policy.vocab_size
        penalised = params.repetition_penalty != 1.0
        parts: list[dict[str, Tensor | None]] = []
        if self.gain is None and answers and self.dtype != "float32":
            self.gain = self._measure_gain(_passes(answers)[0])
        for group in _passes(answers):
            hidden, drafting = self._forward(self.policy, group)
            for row, answer in enumerate(group):
                own = hidden[row], None if drafting is None else drafting[row]
                parts += self._rows(answer, *own, params, seen([answer], None, vocabulary) if penalised else None)
        return make_block(answers, parts, vocabulary)

    def _measure_gain(self, answers: Sequence[Answer]) -> float:
        """Return how much a pass in the engine's precision amplifies its rounding: transformers' forward in both."""
        coarse = replace(self.policy, mtp=None, backbone=cast_weights(self.policy.backbone, self.dtype))
        hidden, rough = (self._forward(replace(policy, mtp=None), answers)[0] for policy in (self.policy, coarse))
        parts, off = list[Sensitivity](), list[Tensor]()
        heads = [policy.backbone.get_output_embeddings() for policy in (self.policy, coarse)]
        for row, answer in enumerate(answers):
            end = len(answer.prompt) + len(answer.token_ids)
            for at in torch.arange(len(answer.prompt), end).split(max(1, ELEMENTS // self.policy.vocab_size)):
                tokens = torch.as_tensor(answer.token_ids)[at - len(answer.prompt)].to(hidden.device)
                logits, own = (head(x[row, at - 1]).double() for head, x in zip(heads, (hidden, rough), strict=True))
                probs = logits.softmax(-1)
                parts.append(Sensitivity.of(hidden[row, at - 1], heads[0].weight, logits, probs, tokens, 1.0))
                apart = own.log_softmax(-1) - logits.log_softmax(-1)
                off.append(apart.gather(1, tokens[:, None])[:, 0])
        return Sensitivity.joined(parts).measured_gain(torch.cat(off), self.dtype)

    def _forward(self, policy: Policy, answers: Sequence[Answer]) -> tuple[Tensor, Tensor | None]:
        """Return the model's states [B, L, d] of prompts and completions, and the head's states one token ahead.

        The head's states are None without a head.
        """
        texts = [torch.tensor([*answer.prompt, *answer.token_ids.tolist()]) for answer in answers]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(policy.device)  # causality hides the padding
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        with stock_attention(policy.backbone, "sdpa"):
            decoder = policy.backbone.get_decoder()
            hidden = decoder(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state
        if policy.mtp is None:
            return hidden, None
        drafting = policy.mtp(policy.embed(ids[:, 1:]), hidden[:, :-1], places[:, :-1], CausalContext())
        return hidden, drafting

    def _rows(
        self,
        answer: Answer,
        hidden: Tensor,
        drafting: Tensor | None,
        params: SamplingParams,
        written: Tensor | None,
    ) -> list[dict[str, Tensor | None]]:
        """Return the fields of a block that depend on the model, one chunk of a completion's positions at a time.

        ``hidden``, ``drafting`` [L, d]: the state after token i predicts token i + 1, and with the token after it token
        i + 2. ``written`` [T, V]: the tokens that the penalty sees at each position.
        """
        start, count = len(answer.prompt), len(answer.token_ids)
        step = max(1, ELEMENTS // self.policy.vocab_size)
        found = []
        for first in range(0, count, step):
            at = torch.arange(start + first, start + min(first + step, count), device=hidden.device)
            own = None if written is None else written[first : first + step].to(hidden.device)
            logits = self._logits(hidden[at - 1])
            # There is no row before the first token of a text: the position's own row replaces it.
            earlier = (at > 1)[:, None]
            probs, near = claimed(logits, params, own)
            rows: dict[str, Tensor] = {"probs": probs}
            before = processed(self._logits(hidden[(at - 2).clamp_min(0)]), params, own)
            rows["before"] = torch.where(earlier, before, rows["probs"])
            if params.temperature != 1 or params.truncated:
                rows["raw"] = logits.softmax(-1)
            if drafting is not None and len(drafting):
                guess = processed(self._logits(drafting[(at - 2).clamp_min(0)]), params, own)
                rows["draft"] = torch.where(earlier, guess, rows["probs"])
            tokens = torch.as_tensor(answer.token_ids)[first : first + step].to(at.device)
            fields = narrowed(rows, tokens, self.columns)
            fields["near"] = near.cpu()
            if self.gain is not None:
                weight = self.policy.backbone.get_output_embeddings().weight
                moved = Sensitivity.of(hidden[at - 1], weight, logits, rows["probs"], tokens, params.temperature)
                fields["spread"] = moved.spread(self.dtype, self.gain).cpu()
            found.append(fields)
        return found

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self.policy.backbone.get_output_embeddings()
        return head(hidden).double()


def cast_weights(backbone: transformers.PreTrainedModel, dtype: str) -> transformers.PreTrainedModel:
    """Return a copy with weights in ``dtype``. Its buffers keep their type: engines keep rotary frequencies in fp32."""
    copied = copy.deepcopy(backbone)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return copied


TABLES = ("probs", "before", "raw", "draft")  # fields of a block that have columns


def narrowed(rows: Mapping[str, Tensor], tokens: Tensor, width: int) -> dict[str, Tensor | None]:
    """Return rows [n, V] over their ``width`` likeliest columns if V is larger; the last one is for all other tokens.

    ``rows``: tables of ``TABLES``; ``tokens`` [n]: the sampled tokens. The result also has ``logprobs``, ``ids`` and
    ``cells``.
    """
    tables = {name: rows[name] for name in TABLES if name in rows}
    probs = tables["probs"]
    fields: dict[str, Tensor | None] = {"logprobs": probs.gather(1, tokens[:, None])[:, 0].log(), "ids": None}
    fields |= dict.fromkeys(("raw", "draft")) | {"cells": tokens}
    if probs.shape[1] > width:
        # The choice of columns is part of the bets, so it may depend only on the text before.
        likely = sum(tables.values(), torch.zeros_like(probs)).topk(width - 1, -1).indices.sort(-1).values
        ids = torch.cat([likely, torch.full_like(likely[:, :1], -1)], 1)
        fields |= {"ids": ids, "cells": cells(ids, tokens)}
        tables = {name: narrow(table, ids) for name, table in tables.items()}
    fields |= tables
    return {name: None if value is None else value.cpu() for name, value in fields.items()}


def processed(logits: Tensor, params: SamplingParams, written: Tensor | None = None) -> Tensor:
    """Return the claimed distribution [n, V] of logits [n, V] in fp64: penalty, temperature, top-k, top-p, min-p.

    ``written`` [n, V]: tokens of prompt and completion so far, to which the penalty applies. Each truncation keeps the
    tokens within ``BORDER`` of its limit, and those as likely as the last one that it keeps.
    """
    return claimed(logits, params, written)[0]


def claimed(logits: Tensor, params: SamplingParams, written: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the claimed distribution, see ``processed``, and where rounding decides what a truncation keeps [n]."""
    if params.repetition_penalty != 1.0 and written is not None:
        weaker = torch.where(logits < 0, logits * params.repetition_penalty, logits / params.repetition_penalty)
        logits = torch.where(written, weaker, logits)
    probs = torch.softmax(logits / params.temperature, -1)
    near = torch.zeros(len(probs), dtype=torch.bool, device=probs.device)
    if 0 < params.top_k < probs.shape[-1]:
        probs = _kept(probs, probs.topk(params.top_k, -1).values[:, -1:])
        near |= (probs > 0).sum(-1) > params.top_k
    if params.top_p < 1.0:
        descending = probs.sort(-1, descending=True).values
        larger = descending.cumsum(-1) - descending
        certain = (larger < params.top_p - BORDER).sum(-1).clamp_min(1)
        probs = _kept(probs, descending.where(larger < params.top_p + BORDER, 1.0).amin(-1, keepdim=True))
        near |= (probs > 0).sum(-1) > certain
    if params.min_p > 0.0:
        least = params.min_p * probs.amax(-1, keepdim=True)
        near |= ((probs >= least * (1 - BORDER)) & (probs < least * (1 + BORDER))).any(-1)
        probs = _kept(probs, least)
    return probs, near


def _kept(probs: Tensor, least: Tensor) -> Tensor:
    """Return the distribution over tokens that are as likely as ``least`` [n, 1], or likelier."""
    left = torch.where(probs >= least * (1 - BORDER), probs, 0.0)
    return left / left.sum(-1, keepdim=True)


def _passes(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Return groups of adjacent completions that share a forward pass.

    A group has at most ``TOKENS`` tokens, padding included, or a single completion.
    """
    groups: list[list[Answer]] = []
    longest = 0
    for answer in answers:
        length = len(answer.prompt) + len(answer.token_ids)
        longest = max(longest, length)
        if groups and (len(groups[-1]) + 1) * longest <= TOKENS:
            groups[-1].append(answer)
        else:
            groups.append([answer])
            longest = length
    return groups
