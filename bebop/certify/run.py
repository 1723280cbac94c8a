"""A certificate from its configuration to its verdict: requests, cohort by cohort, and their evidence.

- A ``Plan`` holds the settings and the number of tokens. It fixes the weights of evidence before the first request.
- ``Run`` samples from an engine, cohort by cohort in the order of submission, and adds up the evidence.
- ``make_run`` makes a run from a configuration: the engine, the reference and the plan.
"""

import contextlib
import dataclasses
import hashlib
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig

from bebop.certify import embedded, function, model_reference, openai_server, served_reference, sglang_server
from bebop.certify.answers import Answer, Block
from bebop.certify.certificate import (
    CAUSES,
    Cause,
    Certificate,
    Place,
    SettingResult,
    decide,
    merged,
    rank_causes,
    scope,
    share,
    warnings_of,
    words,
)
from bebop.certify.declared import ORDER as MODES
from bebop.certify.declared import Found, Mode, candidates, check_reported, declare, find_mode, tolerance
from bebop.certify.evidence import Evidence
from bebop.certify.ledger import Ledger
from bebop.certify.precision import Deviations, entropy
from bebop.certify.reference import LiveEngine, Reference
from bebop.certify.structure import check_structure
from bebop.certify.two_sample import TwoSample, repeated
from bebop.config.certify import LIMIT, CertifyConfig, LogprobMode
from bebop.config.decoding import DecodingConfig
from bebop.model.checkpoint import load_tokenizer, resolve, stop_tokens
from bebop.rollout.engine import Request
from bebop.runtime.preflight import check_model, prompts
from bebop.trajectory import SamplingParams

SEEDS = 1 << 31
STRIDE = 0x5DEECE6D  # odd: no two requests of a setting share a seed
WORST = 12  # positions in the certificate
ALLOWED = 1e-4  # share of reported log-probs that may be off in any precision
CONTEXT = 60  # characters of text before each position
COHORTS = 2  # least number of cohorts of a setting: some directions are learned from the first
PLAIN = DecodingConfig(system="autoregressive", draft_tokens=0)  # decoding that speculation is compared with

# ---- the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Sampling parameters under examination; ``weight``: share of its evidence in the total, fixed beforehand."""

    name: str
    params: SamplingParams
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Requests of a certificate: settings, number of tokens, and conditions for an early end."""

    settings: tuple[Setting, ...]
    white_box_weight: float
    vocabulary: int
    tokens: int  # at each setting
    cohort: int = 16
    alpha: float = 1e-4
    limit_tv: float = 0.02
    logprobs: LogprobMode = (
        "auto"  # declared mode of reported log-probs: raw, temperature, processed, none; auto: detected
    )
    dtype: str = "float32"  # the engine's precision: how far a right log-prob may lie from the reference's
    seed: int = 0
    first_prompt: int = 0
    stop_when_found: bool = True
    stop_when_bounded: bool = False  # end a setting once its bound lies below limit_tv
    progress: bool = False
    updated: bool = False  # weights change during the run, so versions of a completion may rise


def plan_settings(params: SamplingParams, stress: float, white_box: bool) -> tuple[tuple[Setting, ...], float]:
    """Return the settings with their weights, and the white box's weight; all weights together are 1."""
    hot = stress > 0 and stress != params.temperature
    shares = {"as asked": 2.0, "stress": 1.0 if hot else 0.0, "white box": 1.0 if white_box else 0.0}
    total = sum(shares.values())
    settings = [Setting(name="as asked", params=params, weight=shares["as asked"] / total)]
    if hot:
        other = dataclasses.replace(params, temperature=stress)
        settings.append(Setting(name="stress", params=other, weight=shares["stress"] / total))
    return tuple(settings), shares["white box"] / total


@dataclass(slots=True, kw_only=True)
class Examination:
    """State of one setting under examination."""

    setting: Setting
    ledger: Ledger
    against: TwoSample = field(default_factory=TwoSample)
    answers: int = 0
    unfinished: int = 0
    tokens: int = 0
    accepted: int = 0
    tested: int = 0
    contexts: dict[int, Answer] = field(default_factory=dict)
    mode: Mode | None = None  # mode of the reported log-probs

    @property
    def log_e(self) -> float:
        """Return the evidence of this setting: from the ledger, or from the two-sample test without a reference."""
        return self.against.log_e if self.against.pairs else self.ledger.log_e

    @property
    def bound(self) -> float | None:
        """Return the largest total variation per token that the tokens so far do not exclude; None: nothing is bounded.

        It holds at any stopping time, see ``share_bound``.
        """
        return max((one.tv for one in self.ledger.evidence() if one.tv is not None), default=None)

    def bounded(self, bound: float | None, limit: float) -> bool:
        """Return whether the setting may end: the bound is below the limit, and ``COHORTS`` cohorts were examined."""
        return bound is not None and bound < limit and len(self.ledger.history) >= COHORTS

    @property
    def history(self) -> list[tuple[int, float]]:
        """Return tokens and ln E after each cohort."""
        return self.against.history if self.against.pairs else self.ledger.history


def seed_of(seed: int, number: int, stream: int, request: int) -> int:
    """Return a seed of 31 bits, which every server takes; no two of a setting are equal."""
    start = int.from_bytes(hashlib.sha256(f"{seed} {number} {stream}".encode()).digest()[:4], "big")
    return (start + request * STRIDE) % SEEDS


# ---- the run


class Run:
    """Requests to an engine, cohort by cohort in the order of submission, and the evidence of its completions.

    A cohort is evaluated only when all of its completions have arrived, so their lengths do not decide which are
    tested. Completions that are unfinished at the end of the run count as far as they went.
    """

    def __init__(
        self,
        engine: LiveEngine,
        reference: Reference | None,
        prompt: Callable[[int], Sequence[int]],
        plan: Plan,
        other: LiveEngine | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """Store the parts of the run.

        Args:
            prompt: ``prompt(i)`` returns the token ids of prompt i.
            other: an engine without drafts, for a run without reference.
            decode: converts ids to text for the report.
        """
        self.engine, self.reference, self.prompt, self.plan, self.other = engine, reference, prompt, plan, other
        self.decode = decode or (lambda ids: " ".join(map(str, ids)))
        self.structure: list[str] = []
        self.interrupted = False
        self.deviations = Deviations()  # of reported log-probs, if the reference estimates the effect of rounding
        self.off: list[str] = []  # the first reported log-probs that differ from the declared ones
        self.modes: set[str] = {*MODES}  # possible modes of the reported log-probs
        self.done: list[Examination] = []

    def run(self) -> Certificate:
        """Examine every setting, or stop at the first that fails."""
        for number, setting in enumerate(self.plan.settings):
            one = Examination(
                setting=setting,
                ledger=Ledger(
                    self.plan.vocabulary,
                    alpha=self.plan.alpha,
                    seed=self.plan.seed,
                    tolerance=tolerance(self.plan.dtype).nats,
                    allowed=max(ALLOWED, tolerance(self.plan.dtype).share),
                ),
            )
            self.done.append(one)
            self._examine(one, number)
            if self._found() or self.interrupted:
                break
        return self._certificate()

    def _examine(self, one: Examination, number: int) -> None:
        with tqdm(
            total=self.plan.tokens, desc=one.setting.name, unit="token", disable=None if self.plan.progress else True
        ) as bar:
            while one.tokens < self.plan.tokens and not self.interrupted:
                answers = self._ask(self.engine, one, number, bar.update)
                self._weigh(one, number, answers)
                bound = one.bound
                bar.set_postfix_str(f"ln E {one.log_e:.1f}{_so_far(bound, self.plan.limit_tv)}")
                if self._found() or (self.plan.stop_when_bounded and one.bounded(bound, self.plan.limit_tv)):
                    break

    def _ask(self, engine: LiveEngine, one: Examination, number: int, progress: Callable[[int], None]) -> list[Answer]:
        asked = self.requests(one.setting, number, one.answers, 0 if engine is self.engine else 1)
        return engine.sample(asked, progress)

    def requests(self, setting: Setting, number: int, first: int, stream: int = 0) -> list[Request]:
        """Return the cohort that begins with request ``first``: two of each prompt, each with its own seed."""
        asked = []
        for i in range(first, first + self.plan.cohort):
            seed = seed_of(self.plan.seed, number, stream, i)
            ids = tuple(self.prompt(self.plan.first_prompt + i // 2))
            asked.append(Request(id=i, token_ids=ids, params=dataclasses.replace(setting.params, seed=seed)))
        return asked

    def _weigh(self, one: Examination, number: int, answers: Sequence[Answer]) -> None:
        params = one.setting.params
        broken = check_structure(answers, vocabulary=self.plan.vocabulary, updated=self.plan.updated)
        self.structure += map(str, broken)
        self.interrupted |= any(answer.finish_reason == "abort" for answer in answers)
        if broken:
            pass  # proof by itself, and a reference may be unable to read such completions
        elif self.reference is not None:
            one.ledger.update(self._declared(one, self.reference.block(answers, params)))
        elif self.other is not None and not self.interrupted:
            others = self._ask(self.other, one, number, lambda _: None)
            self.interrupted |= any(answer.finish_reason == "abort" for answer in others)
            if not self.interrupted:
                one.against.update(answers, others)
        one.answers += len(answers)
        one.unfinished += sum(answer.finish_reason == "abort" for answer in answers)
        one.tokens += sum(len(answer.token_ids) for answer in answers)
        for answer in answers:
            one.contexts[answer.request] = answer
            accepted, tested = answer.accepted or (0, 0)
            one.accepted, one.tested = one.accepted + accepted, one.tested + tested

    def _declared(self, one: Examination, block: Block) -> Block:
        """Return the block with the declared log-probs.

        With ``auto`` the first cohort of a setting decides the mode, among the modes that earlier settings have not
        excluded. At temperature 1 the raw softmax and the claim may be the same.
        """
        if self.plan.logprobs == "none" or block.reported is None:
            return block
        temperature = one.setting.params.temperature
        if one.mode is None:
            known = {mode: row for mode, row in candidates(block, temperature).items() if mode in self.modes}
            found = find_mode(block.reported, known)
            if self.modes - known.keys() and found.distances.get(found.mode, 0.0) > tolerance(self.plan.dtype).nats:
                found = Found(mode="none", distances=found.distances)  # perhaps a mode that the block cannot compute
            one.mode = found.mode if self.plan.logprobs == "auto" else self.plan.logprobs
            if one.mode != "none":
                self.modes = {one.mode, *found.same} & self.modes
        declared = declare(block, one.mode, temperature)
        self.off += map(str, check_reported(declared, self.plan.dtype, WORST - len(self.off)))
        if declared.spread is not None and declared.declared is not None:
            assert declared.reported is not None
            own = candidates(block, temperature)["processed"]  # ``spread`` belongs to these log-probs
            if torch.allclose(declared.declared, own, rtol=0, atol=0, equal_nan=True):
                centred = declared.logprobs + entropy(declared.probs)
                self.deviations.add(declared.reported - declared.declared, declared.spread, centred)
        return declared

    @property
    def log_e(self) -> float:
        """Return the total evidence, merged by the weights fixed beforehand; unexamined settings count as e = 1."""
        parts = [(one.setting.weight, one.log_e) for one in self.done]
        parts += [(setting.weight, 0.0) for setting in self.plan.settings[len(self.done) :]]
        parts.append((self.plan.white_box_weight, self.engine.white_box.log_e if self.engine.white_box else 0.0))
        return merged(parts)

    def _found(self) -> bool:
        proved = bool(self.structure) or self.log_e >= math.log(1 / self.plan.alpha)
        return proved and self.plan.stop_when_found

    def _certificate(self) -> Certificate:
        plan, log_e, box = self.plan, self.log_e, self.engine.white_box
        settings = tuple(self._result(one) for one in self.done)
        bounds = [one.bound for one in settings] if len(settings) == len(plan.settings) else [None]
        verdict = decide(log_e, plan.alpha, plan.limit_tv, self.structure, bounds)
        seen: tuple[Evidence, ...] = tuple(box.evidence()) if box is not None else ()
        ranked = self._ranked(settings, seen) if verdict == "fail" else ()
        why = Cause(ranked[0][0], CAUSES[ranked[0][0]]) if ranked else None
        known = [bound for bound in bounds if bound is not None]
        sentence, advice = words(
            verdict,
            engine=self.engine.name,
            tokens=sum(one.tokens for one in settings),
            log_e=log_e,
            bound=max(known) if len(known) == len(bounds) else None,
            limit_tv=plan.limit_tv,
            cause=why,
            structure=self.structure,
            referenced=self.reference is not None,
            complete=len(self.done) == len(plan.settings) and not self.interrupted,
        )
        return Certificate(
            verdict=verdict,
            sentence=sentence,
            advice=advice,
            log_e=log_e,
            alpha=plan.alpha,
            limit_tv=plan.limit_tv,
            engine={"name": self.engine.name, **self.engine.describe()},
            reference=_reference(self.reference, self.other),
            settings=settings,
            white_box=seen,
            white_box_weight=plan.white_box_weight,
            cause=why,
            ranked=ranked,
            structure=tuple(self.structure),
            logprobs={
                "of": ", ".join(sorted(self.modes)),
                "tolerance": tolerance(plan.dtype).nats,
                "first that are off": self.off,
                "deviations": self.deviations.measured() if len(self.deviations) else None,
            },
            seeds={"seed": plan.seed, "first prompt": plan.first_prompt, "repeated by seed": self._repeated()},
            scope=scope(settings, min(plan.limit_tv, LIMIT)),
            not_tested=self._not_tested(settings),
            warnings=(
                *warnings_of(settings),
                *(f"log-probs are {sentence}" for sentence in self.deviations.beyond()),
                *(["it was interrupted"] if self.interrupted else []),
            ),
            made={"bebop": version("bebop-rl"), "torch": torch.__version__, "python": platform.python_version()},
        )

    def _repeated(self) -> float | None:
        """Return the share of the first two completions that their seeds reproduce; None: not tested.

        It runs last: repeated draws would be no evidence for the white box.
        """
        one = self.done[0]
        if self.interrupted or len(one.contexts) < 2:
            return None
        again = self.engine.sample(self.requests(one.setting, 0, 0)[:2], lambda _: None)[:2]
        return repeated([one.contexts[0], one.contexts[1]], again)

    def _ranked(self, settings: Sequence[SettingResult], seen: Sequence[Evidence]) -> tuple[tuple[str, float], ...]:
        """Return causes by likelihood, from the strongest evidence: that of a setting, or that of the white box."""
        at = max(range(len(settings)), key=lambda i: settings[i].log_e + math.log(settings[i].weight))
        box = self.engine.white_box
        inside = box is not None and self.plan.white_box_weight > 0 and box.log_e > settings[at].log_e
        evidence = seen if inside else settings[at].evidence
        odds = self.done[at].ledger.reported_odds
        return rank_causes(evidence, structure=bool(self.structure), odds=odds) or (("unknown", 0.0),)

    def _result(self, one: Examination) -> SettingResult:
        return SettingResult(
            name=one.setting.name,
            sampling=dataclasses.asdict(one.setting.params),
            weight=one.setting.weight,
            answers=one.answers,
            unfinished=one.unfinished,
            tokens=one.tokens,
            log_e=one.log_e,
            history=tuple(one.history),
            evidence=tuple(one.ledger.evidence()) if self.reference is not None else (),
            visible=tuple(one.ledger.visible(min(self.plan.limit_tv, LIMIT))) if self.reference is not None else (),
            untested=dict(one.ledger.untested) if self.reference is not None else {},
            places=self._places(one) if self.reference is not None else (),
            acceptance=one.accepted / one.tested if one.tested else None,
        )

    def _places(self, one: Examination) -> tuple[Place, ...]:
        found = []
        for request, position, gain in one.ledger.positions(WORST):
            answer = one.contexts[request]
            ids = answer.token_ids.tolist()
            before = self.decode([*answer.prompt, *ids[:position]])
            token = self.decode(ids[position : position + 1])
            found.append(Place(request=request, position=position, token=token, context=before[-CONTEXT:], gain=gain))
        return tuple(found)

    def _not_tested(self, settings: Sequence[SettingResult]) -> tuple[str, ...]:
        gaps = [
            f"{one.name}: {', '.join(name for name, why in one.untested.items() if why == reason)} ({reason})"
            for one in settings
            for reason in dict.fromkeys(one.untested.values())
        ]
        if self.engine.white_box is None:
            gaps.append("the draws inside verification: the engine lets nobody look inside")
        else:
            gaps += [f"inside verification: {what} ({why})" for what, why in self.engine.white_box.untested.items()]
        if self.reference is None:
            gaps.append("the distribution itself: there is no reference, only completions against completions")
        gaps += [f"{setting.name}: not begun" for setting in self.plan.settings[len(settings) :]]
        return tuple(gaps)


def _so_far(bound: float | None, limit: float) -> str:
    return "" if bound is None else f", at most {share(bound)} of a token is off (limit {share(limit)})"


def _reference(reference: Reference | None, other: LiveEngine | None) -> dict[str, Any]:
    if reference is not None:
        return {"name": reference.name, **reference.describe()}
    return {"name": "none", "held against": None if other is None else other.describe()}


# ---- from a configuration

ENGINES: Mapping[str, Callable[[CertifyConfig], LiveEngine]] = {
    "embedded": embedded.make,
    "sglang": sglang_server.make,
    "openai": openai_server.make,
    "function": function.make,
}
REFERENCES: Mapping[str, Callable[[CertifyConfig, LiveEngine], Reference]] = {
    "model": model_reference.make,
    "server": served_reference.make,
}


def make_run(config: CertifyConfig, stack: contextlib.ExitStack, engine: LiveEngine | None = None) -> Run:
    """Return the run of a configuration; leaving ``stack`` closes the engines that it started.

    ``engine``: an existing engine; None: the engine of the configuration.
    """
    torch.set_num_threads(config.threads)
    check_model(config.model)
    source = prompts(config.model, config.task, config.max_length - config.sampling.max_new_tokens)
    source.prompt(config.first_prompt)
    if engine is None:
        engine = ENGINES[config.engine.name](config)
        stack.callback(engine.close)
    reference = REFERENCES[config.reference](config, engine) if config.reference in REFERENCES else None
    other = _without_drafts(config, stack) if reference is None else None
    tokenizer = load_tokenizer(config.model)

    def prompt(index: int) -> Sequence[int]:
        return source.prompt(index).token_ids

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    return Run(engine, reference, prompt, make_plan(config, engine.white_box is not None), other, decode)


def make_plan(config: CertifyConfig, white_box: bool) -> Plan:
    """Return the plan of a configuration: the requests, and how many of them."""
    settings, weight = plan_settings(sampling_params(config), config.stress, white_box)
    vocabulary = AutoConfig.from_pretrained(resolve(config.model.path), local_files_only=True).vocab_size
    return Plan(
        settings=settings,
        white_box_weight=weight,
        vocabulary=int(vocabulary),
        tokens=config.tokens_asked,
        cohort=config.cohort,
        alpha=config.alpha,
        limit_tv=config.limit,
        logprobs=config.logprobs,
        dtype=config.model.dtype,
        seed=config.seed,
        first_prompt=config.first_prompt,
        stop_when_found=config.stop_when_found,
        stop_when_bounded=config.stop_when_bounded,
        progress=config.progress,
    )


def sampling_params(config: CertifyConfig) -> SamplingParams:
    """Return the claim: the sampling parameters of every completion, without its seed."""
    asked = {field.name: getattr(config.sampling, field.name) for field in dataclasses.fields(config.sampling)}
    return SamplingParams(**asked, stop_token_ids=stop_tokens(config.model))


def _without_drafts(config: CertifyConfig, stack: contextlib.ExitStack) -> LiveEngine | None:
    """Return the engine to compare completions with, without a reference; None: only repeats by seed are tested."""
    if config.engine.name == "embedded":
        plain = dataclasses.replace(config, decoding=PLAIN, white_box=False)
    elif config.engine.other_url is not None:
        plain = dataclasses.replace(config, engine=dataclasses.replace(config.engine, url=config.engine.other_url))
    else:
        return None
    other = ENGINES[plain.engine.name](plain)
    stack.callback(other.close)
    return other
