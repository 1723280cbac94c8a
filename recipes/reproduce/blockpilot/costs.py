"""Processor time of drafts, verification and whole completions, one request at a time; compared arms take turns."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.model.attention import Span
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Draft, Drafter, DraftLength, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.block.network import BlockLengthNetwork
from bebop.systems.block.training import prompt_ends, system_of
from bebop.trajectory import Prompt
from recipes.reproduce.blockpilot.decoding import Array, loaded, once, requests
from recipes.reproduce.blockpilot.sweeps import CANDIDATES, SIZES, TIMES, held_out
from recipes.reproduce.study import QUICK

TIMED = (1, *SIZES)  # block sizes with a cost; 1 is plain decoding
ROUNDS = 1 if QUICK else 2
PROMPTS = 2 if QUICK else 4
SPENT = ("draft", "verify", "cycle")


class Timed:
    """A drafter that measures the processor seconds of its calls."""

    target_pass = None

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.layers, self.seconds = drafter, drafter.layers, 0.0

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """Prefill the inner drafter, untimed; see ``Drafter``."""
        self.drafter.prefill(span, tokens, lengths, out)

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """Propose drafts and add the time; see ``Drafter``."""
        began = time.process_time()
        draft = self.drafter.propose(rows, length)
        self.seconds += time.process_time() - began
        return draft

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """Commit emitted tokens and add the time; see ``Drafter``."""
        began = time.process_time()
        self.drafter.commit(rows, out, tokens, emitted)
        self.seconds += time.process_time() - began


class Clocked(DraftVerify):
    """The decode cycle, with processor seconds of its parts."""

    def configure(self, config: DecodingConfig) -> bool:
        """Configure the decoder, reset the clocks and wrap the drafter; see ``Decoder``."""
        new = super().configure(config)
        self.spent, self.cycles = dict.fromkeys(SPENT, 0.0), 0
        if self.drafter is not None:
            self.timed = Timed(self.drafter)
            self.drafter = self.timed
            self.drafters = dict.fromkeys(self.drafters, self.timed)
        return new

    def cycle(self, batch: int, longest: int, version: int) -> Tensor:
        """Run and time one cycle; see ``Decoder``."""
        began = time.process_time()
        done = super().cycle(batch, longest, version)
        self.spent["cycle"] += time.process_time() - began
        self.spent["draft"] = self.timed.seconds if self.drafter is not None else 0.0
        self.cycles += 1
        return done

    def _verify(self, rows: Rows, draft: Draft) -> TargetOutput:
        began = time.process_time()
        out = super()._verify(rows, draft)
        self.spent["verify"] += time.process_time() - began
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Times of a seed."""

    curves: Array  # [len(TIMED), 3] seconds of a cycle of each size, in columns SPENT
    arms: dict[str, tuple[float, float]]  # arm -> tokens a second, tokens a cycle
    prediction: float  # seconds of one prediction over those of one completion
    same: bool  # whether all arms gave the same completions


def timed(job: tuple[int, int]) -> Costs:
    """Return the times of a seed; the job is (seed, best size for its training prompts)."""
    return once("costs", (job, TIMED, ROUNDS, PROMPTS, TIMES), lambda: _timed(*job))


def _timed(seed: int, best: int) -> Costs:
    model, prompts = loaded(), held_out(seed, PROMPTS)
    most = max(CANDIDATES) - 1
    arms = {
        "plain": system_of(1),
        "bebop": DecodingConfig(system="bebop", draft_tokens=3),
        "block": system_of(best),
        "block_target_only": DecodingConfig(system="block_target_only", draft_tokens=best - 1),
        "blockpilot": DecodingConfig(system="blockpilot", draft_tokens=most),
        "block_ema": DecodingConfig(
            system="block_ema", draft_tokens=most, cost_ratio=TIMES["draft"], verify_ratio=TIMES["verify"]
        ),
    }
    seconds, counts, ids = dict.fromkeys(arms, 0.0), {}, {name: [] for name in arms}  # type: ignore[var-annotated]
    for turn in range(ROUNDS + 1):
        for name, system in arms.items():
            engine = TorchEngine(model, system, slots=1, max_length=512, measure=False)
            began = time.process_time()
            answers = generate(engine, requests(model, prompts))
            if turn:  # the first round warms up
                seconds[name] += (time.process_time() - began) / ROUNDS
            counts[name] = np.sum([(a.stats.emitted, a.stats.cycles) for a in answers], 0)
            ids[name] = [a.token_ids.tolist() for a in answers]
    return Costs(
        curves=np.median([curve(model, prompts[:2]) for _ in range(ROUNDS)], 0),
        arms={n: (counts[n][0] / seconds[n], counts[n][0] / counts[n][1]) for n in arms},
        prediction=prediction(model, prompts[0]) / (seconds["blockpilot"] / len(prompts)),
        same=all(found == ids["plain"] for found in ids.values()),
    )


def curve(model: Policy, prompts: Sequence[Prompt]) -> Array:
    """Return the seconds of a cycle of each size [len(TIMED), 3], in columns ``SPENT``."""
    rows = []
    for size in TIMED:
        engine = TorchEngine(model, system_of(size), slots=1, max_length=512, measure=False)
        clocked: Any = Clocked(model, engine.slots, engine.decoding)
        clocked.measure, engine.decoder, engine.admission.decoder = False, clocked, clocked
        generate(engine, requests(model, prompts, tokens=40))
        rows.append([clocked.spent[name] / clocked.cycles for name in SPENT])
    return np.array(rows)


def prediction(model: Policy, prompt: Prompt, calls: int = 200) -> float:
    """Return the processor seconds of one choice of a size."""
    network = model.parts["block_length"]
    assert isinstance(network, BlockLengthNetwork)
    end = prompt_ends(model, [prompt])
    with torch.inference_mode():
        network.choose(end)
        began = time.process_time()
        for _ in range(calls):
            network.choose(end)
    return (time.process_time() - began) / calls
