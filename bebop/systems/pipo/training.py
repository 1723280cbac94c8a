"""Training of PIPO's network: ``python -m bebop.adapt part=pipo`` (SPEC 2.3, 2.4).

``options.stage=sft`` learns from the model's own correct completions. ``options.stage=opd`` continues with a trained
network, whose own completions the model then judges token by token.
"""

import copy
import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bebop.adaptation.corpus import (
    Parts,
    drafting_config,
    question_streams,
    read_corpus,
    run_engine,
    sampled_rows,
    sampling_params,
    write_corpus,
)
from bebop.adaptation.part_job import StepJob
from bebop.adaptation.ranks import ALONE, Ranks
from bebop.command import writing
from bebop.config.adapt import AdaptConfig
from bebop.config.fields import check
from bebop.config.job import DecodingConfig, SamplingConfig
from bebop.errors import UserError
from bebop.metrics.intervals import ratio
from bebop.model.backbone import Policy, mixed_precision
from bebop.model.checkpoint import load_policy
from bebop.model.parts import find_part, load_part, read_card
from bebop.rollout.detokenize import CompletionText, completed_at
from bebop.systems.pipo.decoding import answer_pairs
from bebop.systems.pipo.losses import PairBatch, PairRow, batch_rows, opd_loss, sft_loss, split_row
from bebop.systems.pipo.network import PairModel, as_pairs, settings_for
from bebop.systems.pipo.options import PipoTraining
from bebop.tasks.rewards import checked, make_reward
from bebop.trainer.chains import TokenRow, rows_of_step
from bebop.trainer.objectives import WHOLE, Sampling
from bebop.trainer.optim import learning_rate
from bebop.trajectory import Completion, Prompt

WARM_UP = 20  # the learning rate rises during the first 1/20 of the steps
CORPUS = "corpus.jsonl"
FIRST_ROLLOUT = 10  # added to the seed with the rollouts' number, so their random numbers differ from all others


class PairTrainer(StepJob):
    """Training job: collect text, train, choose a threshold, and write the part with its held-out results."""

    def __init__(self, config: AdaptConfig, folder: Path, ranks: Ranks = ALONE) -> None:
        """Load the model, and create a network for it or load an existing one."""
        super().__init__(config, folder, ranks)
        embedded = config.data.engine in (None, "torch")
        check(embedded, "data.engine", config.data.engine, "part=pipo samples with the embedded engine: leave it out")
        self.options = options = config.of(PipoTraining)
        if options.stage == "opd":
            own = Sampling.of(config.data.sampling)
            what = "data.sampling.temperature, top_p, top_k"
            given = (own.temperature, own.target_top_p, own.target_top_k)
            check(own == WHOLE, what, given, "distillation compares distributions at temperature 1, with all tokens")
        self.policy = load_policy(config.model)
        self.policy.backbone.requires_grad_(False)
        self.settings, self.network = self._network()
        self.policy.parts["pipo"] = self.network
        warm_up = options.steps // WARM_UP
        self.optimise(self.network, "network of pairs", lr=options.rate, steps=options.steps, warm_up=warm_up)

    def _network(self) -> tuple[dict[str, Any], PairModel]:
        """Return the network's settings and the network: a new one in SFT, the given or shipped one in OPD."""
        options, config = self.options, self.config
        if options.stage == "sft":
            settings = settings_for(self.policy, options.compressor, options.layers, options.pad)
            network = PairModel(**settings).to(self.policy.device)
            network.start_from(self.policy)
            return settings, network
        path = find_part(config.model, "pipo")
        given = load_part("pipo", path, self.policy)
        assert isinstance(given, PairModel)
        return dict(read_card(path).settings), given.requires_grad_(True)

    def run(self) -> str:
        """Run all remaining phases and return the final message."""
        questions, held_out = self.questions()
        self.train(self.given(self.corpus(questions)) if self.options.stage == "sft" else self.own(questions))
        shipped = copy.deepcopy(self.network).bfloat16().float().eval()  # measure the weights as stored
        self.policy.parts["pipo"] = shipped
        tau = tau_for(self.config, self.policy, questions, self.options.pad_ratio, self.label("threshold"))
        self.settings["tau"] = shipped.tau = tau
        results = trial(self.config, self.policy, held_out, {"tau": tau}, self.label("held out"))
        self.save(shipped.bfloat16(), self.settings, results)
        lines = [f"{name:40}{interval['value']:.3f}" for name, interval in results.items()]
        return "\n".join([*lines, ""])

    # ---- text

    def questions(self) -> tuple[list[Prompt], list[Prompt]]:
        """Return training questions and held-out ones, without overlap; raise ``UserError`` if no training question
        remains.
        """
        questions, held_out = question_streams(self.config, self.policy)
        known = {prompt.token_ids for prompt in held_out}
        left = [prompt for prompt in questions if prompt.token_ids not in known]
        if not left:
            raise UserError(f"task.name={self.config.task.name!r} has no question that is not held out")
        return left, held_out

    def corpus(self, questions: Sequence[Prompt]) -> list[TokenRow]:
        """Return the model's own completions with reward 1, several per question; they are stored in the run folder."""
        path = self.folder / CORPUS
        if self.config.resume and path.is_file():
            return read_corpus(path)
        asked = [prompt for prompt in questions for _ in range(self.options.samples)]
        data, parts, label = self.config.data, Parts(path, self.config.resume), self.label("sample")
        decoding, seed, reward = drafting_config(self.policy), self.config.seed, make_reward(self.config.task)
        answers = sampled_rows(self.policy, asked, data, decoding, seed, label, parts=parts)
        texts = texts_of(self.policy, answers, data.sampling)
        rows = [
            row for row, text, prompt in zip(answers, texts, asked, strict=True) if checked(reward, text, prompt) >= 1
        ]
        if not rows:
            raise UserError(f"data.sequences={data.sequences}: none of {len(asked)} completions is right")
        with writing(path):
            write_corpus(rows, path)
            parts.remove()
        return rows

    def given(self, rows: Sequence[TokenRow]) -> Iterator[PairBatch]:
        """Yield batches of correct completions from the next step on, split at random places."""
        options, pad = self.options, self.network.pad
        while True:
            numbers = random.Random(f"{self.config.seed}/{self.version}")
            chosen = rows_of_step(len(rows), options.rows_per_step, self.config.seed, self.version)
            split = [split_row(rows[i], pad, numbers.uniform(0, options.rho), numbers) for i in chosen]
            yield batch_rows(split, pad, self.policy.device)

    def own(self, questions: Sequence[Prompt]) -> Iterator[PairBatch]:
        """Yield batches of the network's own completions, drawn ``rollouts`` at a time with the current weights."""
        options, pad = self.options, self.network.pad
        each = max(1, options.rollouts // options.rows_per_step)  # steps
        while True:
            number, place = divmod(self.version, each)
            rows = self._rollouts(questions, number)
            for step in range(place, each):
                own = rows[step * options.rows_per_step : (step + 1) * options.rows_per_step]
                yield batch_rows(own, pad, self.policy.device)

    def _rollouts(self, questions: Sequence[Prompt], number: int) -> list[PairRow]:
        """Return the rollouts with this number; they are stored in the run folder, so that a resume finds them."""
        path = self.folder / "rollouts" / f"{number:05}.jsonl"
        if self.config.resume and path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            return [PairRow.read(line) for line in lines]
        asked = [questions[i] for i in rows_of_step(len(questions), self.options.rollouts, self.config.seed, number)]
        # A copy: the engine converts it to the model's type, and training continues in fp32.
        self.policy.parts["pipo"] = copy.deepcopy(self.network).eval()
        answers = pair_answers(
            self.config, self.policy, asked, {"tau": self.options.gate}, self.config.seed + FIRST_ROLLOUT + number
        )
        rows = pair_rows(asked, answers, self.network.pad)
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            scratch = path.with_suffix(".new")
            scratch.write_text("".join(row.line() for row in rows), encoding="utf-8")
            scratch.replace(path)
        return rows

    # ---- training

    def train(self, batches: Iterator[PairBatch]) -> None:
        """Take all remaining steps, each on the next batch."""
        self.learn(self.options.steps, lambda: self.update(next(batches)))

    def update(self, batch: PairBatch) -> dict[str, float]:
        """Take one optimizer step on ``batch`` and return its metrics."""
        with mixed_precision(self.policy):
            loss, parts = loss_of(self.network, self.policy, batch, self.options)
        self.optimizer.zero_grad()
        loss.backward()
        numbers = self.optimizer.guarded_step(learning_rate(self.rates, self.version))
        self.version += 1
        return {f"pipo/{name}": value for name, value in {**parts, **numbers}.items()}


def loss_of(
    network: PairModel, policy: Policy, batch: PairBatch, options: PipoTraining
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of the configured stage on a batch, and its parts."""
    weights = {"mtp_weight": options.mtp_weight, "confidence_weight": options.confidence_weight}
    if options.stage == "sft":
        return sft_loss(network, policy, batch, **weights)
    return opd_loss(network, policy, batch, **weights)


def texts_of(policy: Policy, rows: Sequence[TokenRow], sampling: SamplingConfig) -> list[str]:
    """Return the text of each completion that was sampled under ``sampling``, as the engine gives it."""
    params, text = sampling_params(policy, sampling, 0), CompletionText(policy.tokenizer)

    def stopped(ids: Sequence[int]) -> bool:
        return ids[-1] in params.stop_token_ids or completed_at(policy.tokenizer, ids, params.stop) > 0

    return [text(row.answer, params, "stop" if stopped(row.answer) else "length") for row in rows]


# ---- completions drawn in pairs


HALVINGS = 7  # steps of the bisection for the threshold
CALIBRATION = 64  # questions for each step


def pair_answers(
    config: AdaptConfig,
    policy: Policy,
    prompts: Sequence[Prompt],
    options: dict[str, Any],
    seed: int,
    label: str | None = None,
) -> list[Completion]:
    """Return completions by the policy's pair network, each with the decoder's record of its drafts.

    ``options``: options of the decoding system, as {"tau": 0.5}.
    """
    decoding = DecodingConfig(system="pipo", draft_tokens=1, options=options)
    return run_engine(policy, prompts, config.data, decoding, seed, label, keep_state=True)


def pair_rows(prompts: Sequence[Prompt], answers: Sequence[Completion], pad: int) -> list[PairRow]:
    """Return texts in the pairs in which they were drawn, with all drafts, kept or not."""
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer.token_ids.tolist()
        kept, drafts = (answer.state[f"pipo/{name}"][: len(tokens)].tolist() for name in ("kept", "draft"))
        pairs = answer_pairs(tokens, kept, pad)
        places = np.cumsum([0, *(1 + (second != pad) for _, second in pairs)])[:-1].tolist()
        asked = as_pairs(prompt.token_ids, pad)
        drawn = tuple(pad if drafts[place] < 0 else int(drafts[place]) for place in places)
        rows.append(PairRow(pairs=(*asked, *pairs), prompt=len(asked), drafts=drawn))
    return rows


def pad_ratio(answers: Sequence[Completion]) -> float:
    """Return the share of pairs with only one token."""
    return 2 - sum(a.stats.emitted for a in answers) / sum(a.stats.cycles for a in answers)


def tau_for(
    config: AdaptConfig, policy: Policy, prompts: Sequence[Prompt], wanted: float, label: str | None = None
) -> float:
    """Return the threshold at which the pad ratio on some prompts is closest to ``wanted``, by bisecting (0, 1).

    The ratio rises with the threshold: dropped drafts leave more steps to take.
    """
    low, high = 0.0, 1.0
    found: list[tuple[float, float]] = []
    for _ in range(HALVINGS):
        tau = (low + high) / 2
        answers = pair_answers(config, policy, prompts[:CALIBRATION], {"tau": tau}, config.seed + 2, label)
        share = pad_ratio(answers)
        found.append((abs(share - wanted), tau))
        low, high = (tau, high) if share < wanted else (low, tau)
    return min(found)[1]


def trial(
    config: AdaptConfig, policy: Policy, prompts: Sequence[Prompt], options: dict[str, Any], label: str | None = None
) -> dict[str, Any]:
    """Return reward, tokens per pair and pairs per completion on prompts, as intervals over prompts."""
    answers = pair_answers(config, policy, prompts, options, config.seed + 3, label)
    reward = make_reward(config.task)
    rewards = np.array([checked(reward, a.text, p) for p, a in zip(prompts, answers, strict=True)])
    tokens, pairs = (np.array([getattr(a.stats, name) for a in answers], float) for name in ("emitted", "cycles"))
    one = np.ones(len(answers))
    found = {"reward": (rewards, one), "tokens_per_pair": (tokens, pairs), "pairs": (pairs, one)}
    return {name: dataclasses.asdict(ratio(*sums)) for name, sums in found.items()}
