"""Engines of the museum, their requests, and a run under both boxes until a fault is proved."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from bebop.certify.answers import Answer
from bebop.certify.certificate import cause
from bebop.certify.embedded import EmbeddedEngine
from bebop.certify.ledger import Ledger
from bebop.certify.model_reference import ModelReference
from bebop.certify.white_box import WhiteBox
from bebop.config.job import DecodingConfig, ModelConfig
from bebop.model.attention import ATTENTION
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy, load_tokenizer
from bebop.model.mtp import MTPHead
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import SamplingParams
from recipes.certify.museum import planted
from recipes.certify.museum.damage import Cycles
from recipes.certify.museum.exhibits import CLEAN, Exhibit

ALPHA = 1e-4
DRAFTS, COHORT, TOKENS, LENGTH = 3, 16, 96, 512
DECODING = DecodingConfig(system="bebop", draft_tokens=DRAFTS)
STOP = 1
SPREAD, WIDTH = 1.3, 64  # of the random model's logits, and its width
FRONTS: Mapping[str, type[EmbeddedEngine]] = {
    "": EmbeddedEngine,
    "resumed": planted.ResumedEngine,
    "shifted": planted.ShiftedReports,
}


@cache
def policy(model: str) -> Policy:
    """Return the built-in model, or a random one of as many tokens, in float32; callers must not change it.

    The random model has flat distributions and an untrained head, so its drafts are often rejected.
    """
    if model == "tiny":
        return load_policy(ModelConfig(path="tiny", device="cpu"), need_head=True)
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=512, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=STOP, pad_token_id=0, initializer_range=0.2, attn_implementation=ATTENTION,
    )  # fmt: skip
    backbone = Qwen2ForCausalLM(config).float().eval()
    head = MTPHead(backbone).eval()
    with torch.no_grad():
        backbone.lm_head.weight.normal_(0, SPREAD / WIDTH**0.5)
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.25)
    return Policy(backbone=backbone, tokenizer=load_tokenizer(ModelConfig(path="tiny")), mtp=head, layout="mimo")


@cache
def _questions() -> PromptSource:
    from bebop.config.job import TaskConfig

    return PromptSource(TaskConfig(), chat_encoder(policy("tiny").tokenizer), 256)


def _prompt(model: str, index: int) -> tuple[int, ...]:
    if model == "tiny":
        return tuple(_questions().prompt(index).token_ids)
    return tuple(np.random.default_rng(index).integers(2, 512, 8).tolist())


def engine_of(model: str) -> TorchEngine:
    """Return an intact engine over a model; it draws each draft from its recorded q."""
    return TorchEngine(policy(model), DECODING, slots=COHORT, max_length=LENGTH, measure=False, paged=False)


def cohorts(
    engine: EmbeddedEngine, exhibit: Exhibit, temperature: float, seed: int
) -> Iterator[tuple[SamplingParams, list[Answer]]]:
    """Yield completions without end: two for each prompt, every request with its own seed."""
    given = dict(exhibit.sampling)
    params = SamplingParams(
        temperature=temperature,
        max_new_tokens=TOKENS,
        stop_token_ids=(STOP,),
        top_p=given.get("top_p", 1.0),
        top_k=int(given.get("top_k", 0)),
    )
    first = 0
    while True:
        asked = [
            Request(
                id=i,
                token_ids=_prompt(exhibit.model, 100_000 * seed + i // 2),
                params=dataclasses.replace(params, seed=(seed << 32) + i),
            )
            for i in range(first, first + COHORT)
        ]
        yield params, engine.sample(asked, lambda tokens: None)
        first += COHORT


# ---- one run


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxResult:
    """Result of one box: the tokens until it proved a fault, and all of its evidence then."""

    found: int | None  # tokens
    tokens: int
    log_e: float
    highest: float
    cause: str
    evidence: tuple[tuple[str, str, float, float], ...]  # group, direction, ln e, weight
    odds: float | None = None  # mean of claimed over reported probability where they differ
    share: float | None = None  # bound of the share of log-probs that are wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Results of one run under both boxes."""

    black: BoxResult
    white: BoxResult
    acceptance: float


def _white(box: WhiteBox) -> BoxResult:
    kept = tuple((one.group, one.name, round(one.log_e, 3), one.weight) for one in box.evidence())
    return BoxResult(
        found=box.found,
        tokens=box.tokens,
        log_e=box.log_e,
        highest=box.highest,
        cause=cause(box.evidence()).name,
        evidence=kept,
    )


def examine(exhibit: Exhibit, temperature: float, budget: int, seed: int, *, whole: bool = False) -> RunResult:
    """Sample cohorts from an engine with a fault until both boxes have proved it, or ``budget`` tokens are used.

    ``whole``: go on to the end of the budget, as for an engine that should raise no alarm.
    """
    engine, reference = engine_of(exhibit.model), ModelReference(policy(exhibit.model))
    with ExitStack() as stack:
        stack.enter_context(planted.planted(engine, exhibit.fault, temperature, seed))
        if exhibit.front == "resumed":
            stack.enter_context(planted.seeds_without_prefix())
        box = WhiteBox(ALPHA)
        live = FRONTS[exhibit.front](engine, white_box=box, rule=exhibit.rule)
        ledger = Ledger(policy(exhibit.model).vocab_size, alpha=ALPHA, seed=seed, enumerate_rows=False)
        black: BoxResult | None = None
        white: BoxResult | None = None
        counts = np.zeros(2)
        for params, answers in cohorts(live, exhibit, temperature, seed):
            counts += np.sum([answer.accepted or (0, 0) for answer in answers], 0)
            if white is None and box.found is not None:
                white = _white(box)
            if black is None:
                block = reference.block(answers, params)
                ledger.update(dataclasses.replace(block, declared=block.logprobs))
                if ledger.log_e >= math.log(1 / ALPHA):
                    black = _black(ledger)
            spent = box.tokens >= budget
            if spent or (black is not None and white is not None and not whole):
                break
    black = black or _black(ledger)
    white = white or _white(box)
    return RunResult(black=black, white=white, acceptance=float(counts[0] / max(1, counts[1])))


def _black(ledger: Ledger) -> BoxResult:
    evidence = ledger.evidence()
    return BoxResult(
        found=ledger.tokens if ledger.log_e >= math.log(1 / ALPHA) else None,
        tokens=ledger.tokens,
        log_e=ledger.log_e,
        highest=ledger.highest,
        cause=cause(evidence, odds=ledger.reported_odds).name,
        evidence=tuple((one.group, one.name, round(one.log_e, 3), one.weight) for one in evidence),
        odds=ledger.reported_odds,
        share=next((one.share for one in evidence if one.name == "reported"), None),
    )


# ---- rows of an intact run


class _Recorded:
    """Acceptance rule that records its inputs and its decisions."""

    def __init__(self, inner: object) -> None:
        self.inner, self.kept = inner, list[tuple[Tensor, Tensor, Tensor, Tensor]]()
        self.exact, self.stepwise, self.layers, self.counts = True, True, (), ()

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """See ``AcceptanceRule``."""
        accepted: Accepted = self.inner.accept(rows, draft, out, uniforms)  # type: ignore[attr-defined]
        assert draft.probs is not None
        whole = draft.tokens.shape[1] == DRAFTS
        if whole:
            full = torch.ones(rows.batch, dtype=torch.bool) if draft.lengths is None else draft.lengths == DRAFTS
            self.kept.append((out.probs[full], draft.probs[full], draft.tokens[full], accepted.lengths[full]))
        return accepted


def recorded(model: str, temperature: float, sampling: Mapping[str, float], tokens: int = 2000) -> Cycles:
    """Return the cycles of an intact run of about ``tokens`` tokens, with the draft's raw logits."""
    engine = engine_of(model)
    logits: list[Tensor] = []

    def draw(step: planted.Step) -> tuple[Tensor, Tensor]:
        logits.append(step.logits.clone())
        return planted.sample(step.q, step.u), step.q

    exhibit = dataclasses.replace(CLEAN, model=model, sampling=sampling)
    with planted.planted(engine, planted.fault(draw=draw), temperature, 0):
        decoder = engine.decoder
        assert isinstance(decoder, DraftVerify)
        watched = _Recorded(decoder.rule)
        decoder.rule = watched
        count = 0
        for _, answers in cohorts(EmbeddedEngine(engine), exhibit, temperature, 77):
            count += sum(len(answer.token_ids) for answer in answers)
            if count >= tokens:
                break
    steps = torch.stack([torch.cat(logits[at::DRAFTS]) for at in range(DRAFTS)], 1)
    p, q, drafts, accepted = (torch.cat(parts) for parts in zip(*watched.kept, strict=True))
    return Cycles(p=p, q=q, logits=steps, tokens=drafts, accepted=accepted, temperature=temperature)
