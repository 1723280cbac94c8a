"""Questions of the study, and the reward of those that have an answer; imports nothing but Python itself.

The reward is ``task.reward=words.py:all_words``, which runs in a process of its own. A question asks for a sentence
that holds one or two given words. The rest of the sentence is free, so most of its tokens do not matter; the words do.
This is the task that SPEC 0.2 (iii) plans for PAD: most rejected drafts are harmless, and some are not.
"""

import random
import re

NOUNS = (
    "apple anchor ankle arrow autumn badge bakery balloon banana barrel basket battery beach bell bench bicycle "
    "blanket bottle bowl branch bread bridge broom bucket butter button cabin cable camel camera candle canvas "
    "carpet castle cellar chain chair chapel cheese cherry chimney circus clock cloud coat coffee comet compass "
    "copper corner cotton cradle curtain desert diamond dinner doctor dolphin donkey door dragon drawer dream drum "
    "eagle engine envelope falcon farmer feather fence ferry finger flag flute forest fountain garden gate ghost "
    "glass glove guitar hammer harbor helmet hill honey horse hotel island jacket jungle kettle key kitchen kite "
    "ladder lake lamp lantern lemon letter library lion magnet map market meadow mirror monkey moon mountain museum "
    "needle nest ocean onion orchard oven owl painter palace paper parrot pencil pepper piano pillow pilot pirate "
    "planet plate pocket poem pond potato prince pumpkin puppet rabbit radio rain rainbow ribbon river road rocket "
    "roof rope rose saddle sailor salt sand scarf school shadow sheep ship shirt silver singer snow soap soldier "
    "spider spoon stable star statue stone storm sugar suitcase summer sword table tailor teacher temple tent "
    "thunder tiger tower trumpet tunnel turtle umbrella valley village violin volcano wagon wallet water whale "
    "wheel whistle window winter wizard wolf "
).split()
ONE = (
    "Write one sentence with the word '{0}'.",
    "Use the word '{0}' in a sentence.",
    "Write one short sentence about a {0}.",
    "Write a sentence that begins with 'The {0}'.",
    "Say something true about a {0} in one sentence.",
    "Write one funny sentence with the word '{0}'.",
)
TWO = (
    "Write one sentence with the words '{0}' and '{1}'.",
    "Use the words '{0}' and '{1}' in one sentence.",
    "Write one short sentence about a {0} and a {1}.",
)
TEST = 5  # every fifth noun is for the test alone


def nouns(test: bool) -> list[str]:
    """Return the nouns of the test questions, or all others."""
    return [noun for i, noun in enumerate(NOUNS) if (i % TEST == 0) == test]


def one_word(test: bool) -> list[dict[str, str]]:
    """Return every question with one noun, in random order; test questions have nouns of their own."""
    rows = [{"question": text.format(noun), "answer": noun} for text in ONE for noun in nouns(test)]
    return random.Random(f"one/{test}").sample(rows, len(rows))


def two_words(test: bool, count: int) -> list[dict[str, str]]:
    """Return ``count`` different questions with two nouns; test questions have nouns of their own."""
    numbers, known = random.Random(f"two/{test}"), nouns(test)
    found: dict[str, dict[str, str]] = {}
    while len(found) < count:
        pair = numbers.sample(known, 2)
        question = numbers.choice(TWO).format(*pair)
        found[question] = {"question": question, "answer": " ".join(pair)}
    return [*found.values()]


def sums(test: bool, count: int) -> list[dict[str, str]]:
    """Return ``count`` sums that the built-in model can answer, for a smoke run in place of words."""
    numbers = random.Random(f"sums/{test}")
    text = "State the final answer to the following arithmetic problem: {} ="
    rows = []
    for a, b in numbers.sample([(a, b) for a in range(10) for b in range(10) if ((a + b) % TEST == 0) == test], count):
        rows.append({"question": text.format(f"{a} + {b}"), "answer": str(a + b)})
    return rows


def all_words(text: str, item: dict[str, object]) -> float:
    """Return 1 if a completion holds every word of the answer, else 0. Endings may follow a word, as in lamps."""
    words = str(item["answer"]).split()
    return float(all(re.search(rf"\b{re.escape(word)}", text, re.IGNORECASE) for word in words))
