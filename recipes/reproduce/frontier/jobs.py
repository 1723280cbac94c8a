"""Jobs of the study: every arm on a chunk of prompts in turn. Each is kept on disk, so a stopped study resumes."""

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from bebop.adaptation.corpus import sampling_params
from bebop.metrics.intervals import Array
from bebop.model.backbone import Policy
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import generate
from bebop.systems import SYSTEMS
from bebop.tasks.rewards import checked, make_reward
from bebop.trajectory import Completion, Prompt
from recipes.reproduce.frontier import arms
from recipes.reproduce.frontier.arms import ARMS, OWN_WITNESS, Arm, Planted, config, engine, policy
from recipes.reproduce.frontier.witness import COLUMNS, Witness, watching
from recipes.reproduce.study import QUICK, everywhere, once

STUDY = "frontier"
SEED = 7 if QUICK else 11  # seed of prompts and requests; no other study and no trial before the rules used it
PROMPTS = 8 if QUICK else 512
# Batch size -> prompts of a chunk, chunks. At batch 1 only the first prompts are timed: it takes ten times as long.
CHUNKS = {1: (1, 2), 32: (4, 2)} if QUICK else {1: (8, 16), 32: (64, 8)}
BATCHES = tuple(CHUNKS)
WATCHED = 32  # batch size of all measurements other than times
LONGEST = 24 if QUICK else 160  # maximal tokens of a completion
Kind = Literal["timed", "watched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A chunk of prompts at a batch size."""

    kind: Kind
    batch: int
    chunk: int

    @property
    def first(self) -> int:
        """Return the index of the chunk's first prompt."""
        return self.chunk * CHUNKS[self.batch][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Timing of an arm on a chunk of n prompts."""

    processor: float  # seconds, including prefill
    wall: float
    tokens: int
    answers: tuple[int, ...]  # n checksums, to compare completions across batch sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """N completions of an arm, and sums over their observed cycles."""

    success: Array  # [N] 1 or 0
    tokens: Array  # [N] of the answer
    asked: Array  # [N] of the prompt
    passes: Array  # [N] of the backbone
    truncated: Array  # [N] 1 or 0
    sums: dict[str, Array]  # name -> [N], see ``Witness``; "computed" is NaN where no formula gives it
    answers: tuple[int, ...]  # N checksums
    operations: Array  # [chunks] floating-point operations of all cycles
    emitted: Array  # [chunks] tokens of a chunk

    @classmethod
    def joined(cls, parts: Sequence["Watched"]) -> "Watched":
        """Concatenate chunks."""
        names = ("success", "tokens", "asked", "passes", "truncated", "operations", "emitted")
        return cls(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names},
            sums={name: np.concatenate([part.sums[name] for part in parts]) for name in COLUMNS},
            answers=tuple(checksum for part in parts for checksum in part.answers),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    """All measurements, by name of the arm."""

    timed: dict[int, dict[str, list[Timed]]]  # batch -> arm -> a chunk each
    watched: dict[str, Watched]


def plan() -> list[Job]:
    """Return the jobs in an order in which every kind makes progress."""
    jobs = [
        Job(kind="timed", batch=batch, chunk=chunk) for batch, (_, count) in CHUNKS.items() for chunk in range(count)
    ]
    jobs += [Job(kind="watched", batch=WATCHED, chunk=chunk) for chunk in range(CHUNKS[WATCHED][1])]
    return sorted(jobs, key=lambda job: job.chunk / CHUNKS[job.batch][1])


def everything() -> Everything:
    """Run all jobs one after another: no other part of the study may run beside timed work."""
    jobs = plan()
    found = dict(zip(jobs, everywhere(done, jobs, "chunks", workers=1), strict=True))

    def of(kind: Kind, batch: int) -> list[dict[str, Timed | Watched]]:
        return [found[job] for job in sorted(jobs, key=lambda job: job.chunk) if (job.kind, job.batch) == (kind, batch)]

    timed: dict[int, dict[str, list[Timed]]] = {}
    for batch in BATCHES:
        timed[batch] = {
            arm.name: [one for part in of("timed", batch) if isinstance(one := part[arm.name], Timed)] for arm in ARMS
        }
    watched = {
        arm.name: Watched.joined([one for part in of("watched", WATCHED) if isinstance(one := part[arm.name], Watched)])
        for arm in ARMS
    }
    return Everything(timed=timed, watched=watched)


def done(job: Job) -> dict[str, Timed | Watched]:
    """Return the result of each arm on a chunk, which runs unless it is stored."""
    settings = (ARMS, PROMPTS, CHUNKS, SEED, LONGEST)
    return once(STUDY, f"{job.kind}-{job.batch}-{job.chunk}", settings, lambda: _done(job))


def _done(job: Job) -> dict[str, Timed | Watched]:
    model = ready()
    chunk = questions()[job.first : job.first + CHUNKS[job.batch][0]]
    requests = [request(model, job.first + i, prompt) for i, prompt in enumerate(chunk)]
    if job.kind == "watched":
        return {arm.name: watch(model, arm, job.batch, chunk, requests) for arm in ARMS}
    begins = job.chunk * len(ARMS) // CHUNKS[job.batch][1]  # each chunk begins with another arm
    return {arm.name: timing(model, arm, job.batch, requests) for arm in (*ARMS[begins:], *ARMS[:begins])}


@cache
def questions() -> list[Prompt]:
    """Return questions of chain_sum that no part was trained on."""
    return arms.questions(SEED, PROMPTS)


@cache
def ready() -> Policy:
    """Return the policy after a few tokens of every arm, so that one-time costs of a process are not timed."""
    model = policy()
    requests = [request(model, PROMPTS + i, prompt, 8) for i, prompt in enumerate(questions()[:4])]
    for arm in ARMS:
        for batch in BATCHES:
            generate(engine(model, arm, batch), requests)
    return model


def request(model: Policy, number: int, prompt: Prompt, longest: int = LONGEST) -> Request:
    """Return a request for a prompt; every arm has the same one, with the same seed."""
    sampling = config(SEED, f"data.sampling.max_new_tokens={longest}").data.sampling
    return Request(
        id=number, token_ids=prompt.token_ids, params=sampling_params(model, sampling, (SEED << 40) + number)
    )


def timing(model: Policy, arm: Arm, batch: int, requests: Sequence[Request]) -> Timed:
    """Complete the requests without observers and return the times."""
    made = engine(model, arm, batch)
    wall, processor = time.perf_counter(), time.process_time()
    answers = generate(made, requests)
    processor, wall = time.process_time() - processor, time.perf_counter() - wall
    tokens = sum(len(answer.token_ids) for answer in answers)
    return Timed(processor=processor, wall=wall, tokens=tokens, answers=checksums(answers))


def watch(model: Policy, arm: Arm, batch: int, chunk: Sequence[Prompt], requests: Sequence[Request]) -> Watched:
    """Complete the requests with every cycle observed."""
    variation = None if arm.epsilon is None else Planted(arm.epsilon).variation
    witness = Witness([one.params.seed for one in requests], variation)
    made = engine(model, arm, batch, watched=True)
    with watching(made, witness) as spent:
        answers = generate(made, requests)
    stats = [answer.stats for answer in answers]
    sums = {name: values.numpy() for name, values in witness.sums.items()}
    sums["positions"] = sums["positions"] + np.array([one.extra_positions for one in stats], float)
    passes = np.array([one.target_forwards for one in stats], float)
    if SYSTEMS[arm.system].custom_cycle:
        assert not isinstance(made.decoder, DraftVerify)
        sums["witness"] = OWN_WITNESS[arm.system](model, chunk, answers)
        sums["computed"] = np.full(len(answers), np.nan)
        sums["positions"] = passes  # a pair each
    reward = make_reward(config(SEED).task)
    tokens = np.array([len(answer.token_ids) for answer in answers], float)
    return Watched(
        success=np.array([checked(reward, a.text, q) >= 1 for a, q in zip(answers, chunk, strict=True)], float),
        tokens=tokens,
        asked=np.array([len(prompt.token_ids) for prompt in chunk], float),
        passes=passes,
        truncated=np.array([answer.finish_reason == "length" for answer in answers], float),
        sums=sums,
        answers=checksums(answers),
        operations=np.array([spent[0]]),
        emitted=np.array([tokens.sum()]),
    )


def checksums(answers: Sequence[Completion]) -> tuple[int, ...]:
    """Return a checksum of the tokens of each completion."""
    return tuple(zlib.crc32(np.asarray(answer.token_ids, np.int64).tobytes()) for answer in answers)
