"""Prompts of the study: questions of several kinds under the chat template, each in one split, without duplicates."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.tasks.procedural import ProceduralItems
from bebop.tasks.source import chat_encoder
from recipes.reproduce.real.open_prompts import open_questions
from recipes.reproduce.real.plan import SHARES, Kind, Plan

TRIES = 20  # candidates for one prompt: items of some data sets repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPrompt:
    """One prompt of the corpus.

    Example: RealPrompt(number=812, kind="story", split="test", text="Write a ...", token_ids=(1, 4093, ...)).
    """

    number: int  # in the corpus
    kind: str
    split: str  # of ``plan.SPLITS``
    text: str  # the question, without the chat template
    token_ids: tuple[int, ...]  # [P] with it


def make_prompts(plan: Plan, policy: Policy) -> list[RealPrompt]:
    """Return every prompt of the plan, with kinds mixed so that every stretch resembles the whole.

    Kinds added later follow the others and are mixed among themselves, so existing shards keep their content.

    Raises:
        UserError: A kind has too few different questions that are short enough.
    """
    encode = chat_encoder(policy.tokenizer)
    prompts: list[RealPrompt] = []
    for order, kinds in (("mixed", plan.kinds), ("later", plan.later)):
        chosen = [(kind, *one) for kind in kinds for one in _chosen(kind, plan, encode)]
        random.Random(f"{order}/{plan.seed}").shuffle(chosen)
        prompts += [
            RealPrompt(number=number, kind=kind.name, split=split, text=text, token_ids=ids)
            for number, (kind, split, text, ids) in enumerate(chosen, len(prompts))
        ]
    return prompts


def _chosen(
    kind: Kind, plan: Plan, encode: Callable[[str], tuple[str, tuple[int, ...]]]
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return split, question and token ids of each prompt of a kind."""
    known: dict[str, tuple[int, ...]] = {}
    for text in _questions(kind, plan.seed):
        ids = encode(text)[1]
        if text not in known and len(ids) <= plan.max_prompt_tokens:
            known[text] = ids
        if len(known) == kind.count:
            return [(split_of(kind, place, plan.seed), *one) for place, one in enumerate(known.items())]
    raise UserError(
        f"{kind.name}: only {len(known)} of {kind.count} different questions take at most "
        f"{plan.max_prompt_tokens} tokens"
    )


def split_of(kind: Kind, place: int, seed: int) -> str:
    """Return the split of a kind's question number ``place``: exactly 80 %, 5 %, 15 % of each kind, up to rounding."""
    if not kind.seen:
        return "unseen"
    order = random.Random(f"{kind.name}/split/{seed}").sample(range(kind.count), kind.count)
    train, validation = (round(kind.count * share) for share in SHARES)
    rank = order[place]
    return "train" if rank < train else "validation" if rank < train + validation else "test"


def _questions(kind: Kind, seed: int) -> Iterator[str]:
    """Yield candidate questions of a kind, in order."""
    if kind.open:
        yield from open_questions(kind.name, kind.count, seed)
        return
    items = ProceduralItems(kind.name, {}, seed)
    for index in range(TRIES * kind.count):
        yield str(items.item(index)["question"])
