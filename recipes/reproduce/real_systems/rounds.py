"""Rounds in which all arms decode in turns: speed, accept length and reward on held-out questions.

A round has its own questions, the same for all arms, and begins with another arm than the round before. Each round is
stored as it ends. The time is processor time of one thread, or the wall clock after the GPU has finished.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bebop.adaptation.corpus import sampling_params
from bebop.config.job import DecodingConfig, SamplingConfig
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.model.parts import card_of, load_part
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.tasks.source import chat_encoder
from bebop.trajectory import DecodeStats
from recipes.reproduce import study
from recipes.reproduce.real_systems.parts import KIND, model_config, part_path
from recipes.reproduce.real_systems.plan import (
    BLOCK,
    DRAFTS,
    GATES,
    NODES,
    OPEN,
    PAD_RATIO,
    TAUS,
    WORD,
    WORDS,
    Sizes,
    questions,
)
from recipes.reproduce.real_systems.words import all_words
from recipes.reproduce.throughput.timing import stopwatch

PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Way of decoding completions: Arm(system="pad", drafts=3, parts=("pivot",), options={"tau": .3})."""

    system: str
    drafts: int
    parts: tuple[str, ...] = ()  # required parts, by the names of ``parts.KIND``
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Questions and temperature at which arms are compared.

    Example: Setting(kind="open", temperature=0.0, arms={...}).
    """

    kind: str
    temperature: float
    arms: Mapping[str, Arm]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Measurements of one arm in one round."""

    seconds: float
    tokens: int
    cycles: int
    answers: int
    reward: float  # mean; NaN for questions without an answer
    entropy: float  # of the target at the first draft of a cycle, nats; NaN without drafts
    counts: Mapping[str, float]  # the system's own counters, summed

    @property
    def speed(self) -> float:
        """Return the tokens per second."""
        return self.tokens / self.seconds

    @property
    def length(self) -> float:
        """Return the tokens per cycle."""
        return self.tokens / self.cycles


Round = Mapping[str, Decoded]  # by arm


def _drafted() -> dict[str, Arm]:
    """Return the baselines of every setting: plain decoding, the MTP head, and look-ups in the context."""
    return {
        PLAIN: Arm(system="autoregressive", drafts=0),
        "MTP": Arm(system="bebop", drafts=DRAFTS),
        "n-gram": Arm(system="ngram", drafts=DRAFTS),
    }


def firp_arms() -> dict[str, Arm]:
    """Return the arms beside FIRP."""
    return {
        **_drafted(),
        "MTP, tree": Arm(system="bebop_tree", drafts=NODES),
        "FIRP, tree": Arm(system="firp", drafts=NODES, parts=("firp",)),
        "FIRP, chain": Arm(system="firp_chain", drafts=DRAFTS, parts=("firp",)),
    }


def block_arms(block: int = BLOCK) -> dict[str, Arm]:
    """Return the arms beside block drafts."""
    return {
        **_drafted(),
        "block": Arm(system="block", drafts=block - 1, parts=("block",)),
        "block, half": Arm(system="block", drafts=max(1, block // 2 - 1), parts=("block",)),
        "BlockPilot": Arm(system="blockpilot", drafts=block - 1, parts=("block", "block_length")),
        "block, by cycle": Arm(system="block_ema", drafts=block - 1, parts=("block",)),
    }


def pipo_arms() -> dict[str, Arm]:
    """Return PIPO's networks at every gate, and a random gate that keeps the share 1 - ``PAD_RATIO`` of the drafts."""
    names = {"SFT": "pipo_sft", "more SFT": "pipo_more", "OPD": "pipo_opd"}
    arms = {
        f"{name}, {gate}": Arm(system="pipo", drafts=1, parts=(part,), options={} if tau is None else {"tau": tau})
        for name, part in names.items()
        for gate, tau in GATES.items()
    }
    # The part's threshold is chosen for a pad ratio of .35, so the random gate keeps the remaining share of the drafts.
    by_chance = Arm(system="pipo", drafts=1, parts=("pipo_opd",), options={"gate": "random", "keep": 1 - PAD_RATIO})
    return {**arms, "OPD, random": by_chance}


def settings(sizes: Sizes) -> dict[str, Setting]:
    """Return the settings by name."""
    block = int(sizes.options["block"]["block"])
    pad = {f"PAD {tau}": Arm(system="pad", drafts=DRAFTS, parts=("pivot",), options={"tau": tau}) for tau in TAUS}
    # PIPO's baseline: every cycle keeps one draft of the head, whatever the target's probabilities, because all scores
    # are below 1. A draft that would end the completion is verified as usual.
    unverified = Arm(system="pad", drafts=1, parts=("pivot",), options={"tau": 1.0, "p_min": 0.0})
    return {
        "open, greedy": Setting(kind="open", temperature=0.0, arms=firp_arms()),
        "open, sampled": Setting(kind="open", temperature=OPEN, arms=firp_arms()),
        "blocks, greedy": Setting(kind="open", temperature=0.0, arms=block_arms(block)),
        "blocks, sampled": Setting(kind="open", temperature=OPEN, arms=block_arms(block)),
        "words": Setting(kind="words", temperature=WORDS, arms={**_drafted(), **pad, "MTP, unverified": unverified}),
        "word": Setting(kind="word", temperature=WORD, arms={PLAIN: _drafted()[PLAIN], **pipo_arms()}),
    }


def there(place: Path, setting: Setting) -> dict[str, Arm]:
    """Return the arms of a setting whose parts are trained."""
    return {
        name: arm
        for name, arm in setting.arms.items()
        if all(card_of(part_path(place, part)).is_file() for part in arm.parts)
    }


class Bench:
    """A model that decodes with one arm after another, and loads parts at their first use."""

    def __init__(self, place: Path, sizes: Sizes) -> None:
        torch.set_num_threads(1)
        self.place, self.sizes = place, sizes
        self.policy: Policy = load_policy(model_config(place, sizes))
        self._parts: dict[str, torch.nn.Module] = {}
        encode = chat_encoder(self.policy.tokenizer)
        asked = questions(sizes, test=True)
        self.asked = {kind: [(encode(row["question"])[1], row) for row in rows] for kind, rows in asked.items()}

    def decode(self, setting: Setting, arm: Arm, turn: int, brief: bool = False) -> Decoded:
        """Decode the questions of a round one at a time; ``brief``: a few tokens of the first one alone."""
        for name in arm.parts:
            if name not in self._parts:
                self._parts[name] = load_part(KIND[name][0], part_path(self.place, name), self.policy)
            self.policy.parts[KIND[name][0]] = self._parts[name]
        known, count = self.asked[setting.kind], 1 if brief else self.sizes.answers[setting.kind]
        chosen = [known[(turn * count + i) % len(known)] for i in range(count)]
        most = 4 if brief else self.sizes.new[setting.kind]
        sampling = SamplingConfig(temperature=setting.temperature, max_new_tokens=most)
        wanted = [
            Request(id=i, token_ids=ids, params=sampling_params(self.policy, sampling, ((1 + turn) << 20) + i))
            for i, (ids, _) in enumerate(chosen)
        ]
        config = DecodingConfig(system=arm.system, draft_tokens=arm.drafts, options=dict(arm.options))
        length = most + 8 + max(len(ids) for ids, _ in chosen)
        clock = stopwatch(self.policy.device)
        engine = TorchEngine(self.policy, config, slots=1, max_length=length)
        began = clock()
        answers = generate(engine, wanted)
        seconds = clock() - began
        stats = DecodeStats.total(answer.stats for answer in answers)
        judged = [
            all_words(answer.text, row) for answer, (_, row) in zip(answers, chosen, strict=True) if row["answer"]
        ]
        reached = float(stats.reached[0]) if len(stats.reached) and SYSTEMS[arm.system].drafts else 0.0
        return Decoded(
            seconds=seconds,
            tokens=stats.tokens,
            cycles=stats.cycles,
            answers=len(answers),
            reward=float(np.mean(judged)) if judged else float("nan"),
            entropy=float(stats.target_entropy[0] / reached) if reached and len(stats.target_entropy) else float("nan"),
            counts={name: float(np.sum(values)) for name, values in stats.counts.items()},
        )


def measure(
    place: Path,
    sizes: Sizes,
    progress: Callable[[], object],
    late: Callable[[], bool] = lambda: False,
    keep: Callable[[str, int, str, dict[str, Any]], None] = lambda *_: None,
    names: Sequence[str] | None = None,
) -> dict[str, list[Round]]:
    """Return the rounds of every setting; rounds stored on disk are not measured again.

    Args:
        place: folder of the parts; arms with missing parts are left out.
        sizes: number of rounds and completions.
        progress: called after each round of a setting.
        late: called before each of them; once it returns True, no further one begins.
        keep: called with setting, round, arm and numbers as soon as an arm has decoded.
        names: settings to decode; None for all.
    """
    bench = Bench(place, sizes)
    chosen = {name: one for name, one in settings(sizes).items() if names is None or name in names}
    found: dict[str, list[Round]] = {name: [] for name in chosen}
    for setting in chosen.values():  # the first passes of an arm are slow: kernels are compiled
        for arm in there(place, setting).values():
            bench.decode(setting, arm, 0, brief=True)
    for turn in range(sizes.rounds):
        for name, setting in chosen.items():
            if late():
                return found
            arms = there(place, setting)

            key = (sizes, turn, {arm: _made(place, one) for arm, one in arms.items()})
            turns = partial(_turns, bench, setting, arms, turn, partial(keep, name, turn))
            found[name].append(study.once("real_systems", f"{name}-{turn}", key, turns))
            progress()
    return found


def _made(place: Path, arm: Arm) -> list[int]:
    """Return the write times of an arm's parts: rounds with other parts are other rounds."""
    return [part_path(place, part).stat().st_mtime_ns for part in arm.parts]


def _turns(
    bench: Bench, setting: Setting, arms: Mapping[str, Arm], turn: int, keep: Callable[[str, dict[str, Any]], None]
) -> Round:
    """Decode a round with all arms, starting from another arm in each round."""
    names: Sequence[str] = [*arms]
    first = turn * len(names) // bench.sizes.rounds
    found: dict[str, Decoded] = {}
    for name in (*names[first:], *names[:first]):
        found[name] = bench.decode(setting, arms[name], turn)
        keep(name, asdict(found[name]))
    return {name: found[name] for name in names}
