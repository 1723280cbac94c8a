"""Measurements of one seed; each part is kept on disk, so an interrupted study resumes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity as cosine

from bebop.adaptation.corpus import question_streams
from bebop.bench.first_token import first_token
from bebop.model.backbone import Policy
from bebop.systems.pipo.network import PairModel
from bebop.trainer.chains import TokenRow
from bebop.trajectory import Prompt
from recipes.reproduce.pipo.arms import (
    ARMS,
    DEFAULT,
    DISTILLED,
    QUESTIONS,
    RANDOM,
    config,
    corpus,
    held_out,
    once,
    part,
)
from recipes.reproduce.pipo.decoding import Answers, Array, loaded, measure, plain, short, thresholds
from recipes.reproduce.study import QUICK, policy

MAIN = 0.35  # of the drafts are dropped where arms are compared
SHARES = (0.0, 0.15, MAIN, 0.55, 1.0)  # dropped in the sweep
SWEPT = (DEFAULT, DISTILLED)
BY_CHANCE = "OPD, random gate"
PROBED = (DEFAULT, DISTILLED, RANDOM)
PROMPT, ROUNDS = (64, 2) if QUICK else (1024, 5)  # tokens of the prompts whose first token is timed
SHORT = 8 if QUICK else 3000  # short answers
PROBES = 8 if QUICK else 64  # pairs of tokens whose compression is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All measurements of one seed."""

    answers: dict[tuple[str, float], Answers]  # (arm, share of drafts dropped)
    shipped: Answers  # by the shipped part, at its own threshold
    plain: tuple[Array, Array]  # reward and tokens of the built-in model's own answers
    first: Array  # [rounds, 2] processor seconds to the first token: plain, in pairs
    short: tuple[int, int]  # PADs in so many short answers of the shipped network
    probes: dict[str, dict[str, float]]  # arm -> name -> value


def run(seed: int) -> Measured:
    """Train the missing networks of a seed, then measure all of them."""
    prompts = held_out(seed)
    answers: dict[tuple[str, float], Answers] = {}
    for arm in ARMS:
        path = part(arm, seed)
        model = loaded(path)
        shares = SHARES if arm in SWEPT else (MAIN,)
        taus = once(f"{arm}-{seed}-taus", lambda m=model, s=shares: thresholds(m, training(seed), s, seed))
        for share in shares:
            answers[arm, share] = once(
                f"{arm}-{seed}-{share}", lambda m=model, o={"tau": taus[share]}: measure(m, prompts, o, seed)
            )
        if arm == DISTILLED:
            for share in SHARES[1:-1]:
                options = {"gate": "random", "keep": answers[arm, share].kept}
                answers[BY_CHANCE, share] = once(
                    f"random-{seed}-{share}",
                    lambda m=model, o=options: measure(m, prompts, o, seed),
                )
    shipped = once(f"shipped-{seed}", lambda: measure(loaded(None), prompts, {}, seed))
    return Measured(
        answers=answers,
        short=once(f"short-{seed}", lambda: short(loaded(None), training(seed, SHORT), seed)),
        shipped=shipped,
        plain=once(f"plain-{seed}", lambda: plain(prompts, seed)),
        first=timed(seed),
        probes={arm: probes(loaded(part(arm, seed)), corpus(), seed) for arm in PROBED},
    )


def training(seed: int, count: int = QUESTIONS) -> list[Prompt]:
    """Return the first ``count`` questions of the training stream; it goes on beyond the training set."""
    return question_streams(config(seed, f"data.sequences={count}"), policy())[0]


def timed(seed: int) -> Array:
    """Return the result of ``first_tokens``, computed once and kept."""
    return once(f"first-{seed}", lambda: first_tokens(seed))


def first_tokens(seed: int) -> Array:
    """Return processor seconds to the first token of random prompts [rounds, 2]: plain, then in pairs.

    Both systems take turns; the first turn is dropped.
    """
    model = loaded(None)
    turns = [
        [first_token(model, system, PROMPT, seed * 100 + turn)[0] for system in ("autoregressive", "pipo")]
        for turn in range(ROUNDS + 1)
    ]
    return np.array(turns[1:])


# ---- the compressor


def probes(model: Policy, rows: Sequence[TokenRow], seed: int) -> dict[str, float]:
    """Measure how the compressor maps pairs of neighbouring tokens in completions, as means (SPEC 2.6)."""
    network = model.parts["pipo"]
    assert isinstance(network, PairModel)
    numbers = np.random.default_rng(seed)
    chosen = [rows[i].answer for i in numbers.choice(len(rows), PROBES)]
    starts = [int(numbers.integers(len(answer) - 1)) for answer in chosen]
    pairs = torch.tensor([answer[i : i + 2] for answer, i in zip(chosen, starts, strict=True)])
    with torch.no_grad():
        both = model.embed(pairs)
        pad = model.embed(torch.tensor(network.pad)).expand_as(both[:, 0])

        def f(first: Tensor, second: Tensor) -> Tensor:
            return network.compress(torch.stack([first, second], -2))

        a, b = both.unbind(1)
        z, alone = f(a, b), f(a, pad)
    shares = [jacobian_share(network, pair) for pair in both]
    return {
        "Jacobian share of the first": float(np.mean(shares)),
        "cosine of f(a, b) and f(b, a)": float(cosine(z, f(b, a).detach(), -1).mean()),
        "cosine with a + b": float(cosine(z, a + b, -1).mean()),
        "cosine with a": float(cosine(z, a, -1).mean()),
        "cosine with b": float(cosine(z, b, -1).mean()),
        "cosine of f(a, PAD) and a": float(cosine(alone, a, -1).mean()),
        "length of f(PAD, PAD) over f(a, b)": float((f(pad, pad).norm(dim=-1).mean() / z.norm(dim=-1).mean()).detach()),
    }


def jacobian_share(network: PairModel, pair: Tensor) -> float:
    """Return the first embedding's share of the derivative with respect to both [2, d], by Frobenius norms."""
    jacobian = torch.autograd.functional.jacobian(network.compress, pair)  # [d, 2, d]
    first, second = (float(jacobian[:, i].norm()) for i in (0, 1))
    return first / (first + second)
