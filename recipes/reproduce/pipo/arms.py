"""Training of the study's networks; each is kept on disk, so that an interrupted study resumes."""

import copy
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safetensors.torch import load_file

from bebop.adaptation.corpus import question_streams, read_corpus, write_corpus
from bebop.adaptation.part_job import store
from bebop.config.adapt import AdaptConfig
from bebop.config.compose import adapt_config
from bebop.config.job import ModelConfig
from bebop.model.parts import card_of, find_part, read_card
from bebop.systems.pipo.training import PairTrainer
from bebop.trainer.chains import TokenRow
from bebop.trajectory import Prompt
from recipes.reproduce import study
from recipes.reproduce.study import FOLDER, QUICK, policy

T = TypeVar("T")
QUESTIONS = 24 if QUICK else 1500  # two answers each, of which the right ones are kept
HELD_OUT = 4 if QUICK else 128  # questions of a seed that are answered
SHIPPED = 3000  # questions of the same stream that the shipped part was trained on
SFT_STEPS = 2 if QUICK else 400
MORE_STEPS = 2 if QUICK else 72  # of distillation, and of more SFT beside it
ROLLOUTS = 4 if QUICK else 96
LONGEST = 24 if QUICK else 160  # tokens of an answer; right ones are longer than 24
KEPT = f"pipo/{QUESTIONS}-{HELD_OUT}-{SFT_STEPS}-{MORE_STEPS}-{ROLLOUTS}-{LONGEST}"  # other sizes are other jobs
RUNS = FOLDER / KEPT
DEFAULT, DISTILLED, MORE = "SFT", "OPD", "more SFT"
RANDOM, NO_PADS = "random compressor", "no PADs in training"
ABLATIONS = {RANDOM: ("options.compressor=random",), NO_PADS: ("options.rho=0",)}
SHIPPED_SFT, SHIPPED_OPD = "shipped SFT", "OPD of the shipped"
ARMS = (DEFAULT, DISTILLED, MORE, *ABLATIONS, SHIPPED_SFT, SHIPPED_OPD)
RATE_OF_MORE = 5e-4  # the learning rate of distillation, for more SFT as well


def config(seed: int, *overrides: str) -> AdaptConfig:
    """Return the configuration of a seed: all seeds train on the same questions, but each has its own held-out ones."""
    own = (
        "part=pipo", "task=chain_sum", f"seed={seed}", "model.device=cpu", "model.check=false", "train.threads=1",
        f"data.sequences={QUESTIONS}", "data.slots=128", "train.save_every=40", "train.keep=1", "progress=false",
        f"options.rollouts={ROLLOUTS}", "evaluation.prompts=2",
        f"data.sampling.max_new_tokens={LONGEST}",
    )  # fmt: skip
    replaced = {override.split("=")[0] for override in overrides}
    return adapt_config([*(one for one in own if one.split("=")[0] not in replaced), *overrides])


def held_out(seed: int, count: int = HELD_OUT) -> list[Prompt]:
    """Return questions of a seed that no network was trained on."""
    asked = config(seed, f"task.seed={1 + seed}", f"evaluation.prompts={max(2, 2 * count)}")
    known = {prompt.token_ids for prompt in question_streams(config(0, f"data.sequences={SHIPPED}"), policy())[0]}
    _, fresh = question_streams(asked, policy())
    return [prompt for prompt in fresh if prompt.token_ids not in known][:count]


def corpus() -> list[TokenRow]:
    """Return the built-in model's right answers to the training questions, sampled once."""
    path = RUNS / "corpus.jsonl"
    if not path.is_file():
        began = time.process_time()
        job = PairTrainer(config(0, "data.sampling.max_new_tokens=160"), RUNS)
        (RUNS / "drawn").mkdir(parents=True, exist_ok=True)
        job.folder = RUNS / "drawn"
        rows = job.corpus(job.questions()[0])
        write_corpus(rows, path)
        note("corpus", began)
    return read_corpus(path)


def part(arm: str, seed: int) -> Path:
    """Return the file of an arm's network; train it first if it is missing."""
    if arm == SHIPPED_SFT:
        return find_part(ModelConfig(path="tiny"), "pipo")
    folder = RUNS / "arms" / f"{arm.replace(' ', '_')}-{seed}"
    path = folder / "pipo.safetensors"
    if not card_of(path).is_file():  # it is written last
        begins = {DISTILLED: DEFAULT, MORE: DEFAULT, SHIPPED_OPD: SHIPPED_SFT}
        rows, first = corpus(), part(begins[arm], seed) if arm in begins else None
        began = time.process_time()
        folder.mkdir(parents=True, exist_ok=True)
        _train(arm, seed, folder, rows, first)
        note(f"train {arm} {seed}", began)
    return path


def _train(arm: str, seed: int, folder: Path, rows: list[TokenRow], first: Path | None) -> None:
    distilled = arm in (DISTILLED, SHIPPED_OPD)
    if distilled:
        overrides = ("options.stage=opd", f"options.steps={MORE_STEPS}", f"model.parts.pipo={first}")
    elif arm == MORE:
        overrides = (f"options.steps={MORE_STEPS}", f"options.lr={RATE_OF_MORE}")
    else:
        overrides = (f"options.steps={SFT_STEPS}", *ABLATIONS.get(arm, ()))
    stopped = store(folder).newest_sound() is not None
    job = PairTrainer(config(seed, f"dir={folder}", f"resume={stopped}", *overrides), folder)
    if arm == MORE:
        assert first is not None
        job.network.load_state_dict(load_file(first))
    job.prepare()
    job.train(job.own(job.questions()[0]) if distilled else job.given(rows))
    settings = dict(read_card(first).settings) if first is not None else job.settings
    job.save(copy.deepcopy(job.network).bfloat16(), settings, {})
    shutil.rmtree(folder / "checkpoints")  # 25 MB of an arm that is finished


# ---- what is kept


def once(name: str, make: Callable[[], T]) -> T:
    """Run ``make`` once and keep its result; see ``study.once``."""
    return study.once(KEPT, name, (), make)


def note(name: str, began: float) -> None:
    """Record the processor seconds of a training, or of the corpus."""
    RUNS.mkdir(parents=True, exist_ok=True)
    with (RUNS / "seconds.tsv").open("a", encoding="utf-8") as file:
        file.write(f"{name}\t{time.process_time() - began:.1f}\n")


def spent() -> float:
    """Return the processor seconds of all jobs that are kept."""
    path = RUNS / "seconds.tsv"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return study.spent(KEPT) + sum(float(line.split("\t")[1]) for line in lines)
