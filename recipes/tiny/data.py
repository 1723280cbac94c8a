"""Examples for the built-in model: reasoning-gym questions with worked solutions, and the tokenizer made from them."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import reasoning_gym
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SEPARATORS = ("\n", "; ", ", then ", " and ")
# The same arguments as in conf/task/*.yaml: what the model is trained on is what it is asked.
TASKS: dict[str, tuple[float, float, dict[str, Any]]] = {
    # name: (share of the examples, probability of a slip per step, arguments of the data set)
    "chain_sum": (0.60, 0.10, dict(min_terms=8, max_terms=11, min_digits=1, max_digits=1)),
    "gcd": (0.25, 0.06, dict(min_value=10, max_value=60)),
    "number_sorting": (
        0.15, 0.06, dict(min_numbers=4, max_numbers=5, min_value=0, max_value=99, min_decimals=0, max_decimals=0),
    ),
}  # fmt: skip
SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>", "<answer>", "</answer>")
TEMPLATE = (
    "{% for m in messages %}{{ '<' + ('user' if m['role'] == 'tool' else m['role']) + '>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Question with a worked solution: task="gcd", question="Find the ...", solution="By Euclid: 12-8=4 ..."."""

    task: str
    question: str
    solution: str


def examples(seed: int, count: int) -> Iterator[Example]:
    """Yield ``count`` examples, with the tasks mixed by their shares.

    Seeds of this recipe start at 10**6; jobs use small ones.
    """
    rng = random.Random(seed)
    sets = {name: iter(_dataset(name, seed + i, count)) for i, name in enumerate(TASKS)}
    shares = [share for share, _, _ in TASKS.values()]
    for _ in range(count):
        name = rng.choices(list(TASKS), shares)[0]
        item = next(sets[name])
        yield Example(
            task=name, question=item["question"], solution=SOLVERS[name](item["metadata"], rng, TASKS[name][1])
        )


def _dataset(name: str, seed: int, count: int) -> Any:
    return reasoning_gym.create_dataset(name, seed=10**6 * (seed + 1), size=count, **TASKS[name][2])


def make_tokenizer(texts: Iterator[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with single digits: it encodes any text, and numbers digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    return fast


# ---- worked solutions
#
# Every solution reasons step by step and gives its answer between ``<answer>`` tags; the answer alone is never shown,
# so the steps cannot be skipped. A step *slips* with a fixed probability and the rest goes on from the wrong value: the
# model learns the correct arithmetic as the mode of its distribution and the slips as its tail. Reinforcement learning
# then has something to mend, and the distribution has entropy (slips, wordings, separators) for drafting to cope with.


def slip(value: int, rng: random.Random) -> int:
    """Return a wrong result near ``value``: off by one, by two, by ten, or with its sign lost."""
    off = rng.choice((1, -1, 1, -1, 2, -2, 10, -10))
    return -value if value and rng.random() < 0.15 else value + off


def solve_chain_sum(metadata: dict[str, Any], rng: random.Random, slips: float) -> str:
    """Write the running totals from left to right: ``4+1=5``, ``5-7=-2``, ..."""
    first, *rest = re.findall(r"[+-]?\s*\d+", metadata["expression"])
    total = int(first)
    steps = []
    for term in rest:
        sign, number = term[0], int(term[1:])
        result = total + number if sign == "+" else total - number
        if rng.random() < slips:
            result = slip(result, rng)
        steps.append(f"{total}{sign}{number}={result}")
        total = result
    opening = rng.choice(("Step by step: ", "From left to right: ", "Running total: "))
    return opening + _join(steps, rng) + _closing(str(total), rng)


def solve_gcd(metadata: dict[str, Any], rng: random.Random, slips: float) -> str:
    """Write Euclid's algorithm by subtraction: the larger minus the smaller until both are equal."""
    a, b = sorted(metadata["numbers"], reverse=True)
    steps = []
    while a != b and len(steps) < 18:
        difference = a - b
        if rng.random() < slips:
            difference = max(1, slip(difference, rng))
        steps.append(f"{a}-{b}={difference}")
        a, b = max(b, difference), min(b, difference)
    opening = rng.choice(("Subtract: ", "By Euclid: "))
    return opening + _join([*steps, f"{a}={b}"], rng) + _closing(str(b), rng)


def solve_number_sorting(metadata: dict[str, Any], rng: random.Random, slips: float) -> str:
    """Write a selection sort: name the next number, then list the numbers left."""
    left = [int(float(x)) for x in metadata["original_numbers"]]
    ascending = metadata["direction"] == "ascending"
    word = "least" if ascending else "most"
    taken, steps = [], []
    while left:
        ranked = sorted(left, reverse=not ascending)
        pick = ranked[1] if len(ranked) > 1 and rng.random() < slips else ranked[0]
        left.remove(pick)
        taken.append(str(pick))
        steps.append(f"{word} {pick}" + (" left " + " ".join(map(str, left)) if left else ""))
    return _join(steps, rng) + _closing(str(taken), rng)


SOLVERS: dict[str, Callable[[dict[str, Any], random.Random, float], str]] = {
    "chain_sum": solve_chain_sum,
    "gcd": solve_gcd,
    "number_sorting": solve_number_sorting,
}


def _join(steps: list[str], rng: random.Random) -> str:
    """Join the steps with a separator drawn anew each time: equally good wordings add entropy without error."""
    return "".join(step + (rng.choice(SEPARATORS) if i + 1 < len(steps) else "") for i, step in enumerate(steps))


def _closing(answer: str, rng: random.Random) -> str:
    words = rng.choice(("\nSo it is ", "\nThe answer is ", "\nResult: "))
    return f"{words}<answer>{answer}</answer>"
