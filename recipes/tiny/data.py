"""Examples for the built-in model: reasoning-gym questions with worked solutions, and the tokenizer made from them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import reasoning_gym
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from recipes.tiny.solutions import SOLVERS

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
    """A question with one worked solution: task="gcd", question="Find the ...", solution="By Euclid: 12-8=4 ..."."""

    task: str
    question: str
    solution: str


def examples(seed: int, count: int) -> Iterator[Example]:
    """``count`` examples, the tasks mixed by their shares. Seeds of the recipe start at 10**6; jobs use small ones."""
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
    """Byte-level BPE with single digits: any text has a code, and numbers are read digit by digit."""
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
