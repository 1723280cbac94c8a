"""Rows of the trainer's logits as the black box takes them, counted again by hand; wide and narrowed to columns."""

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.certify.answers import Answer, Block
from bebop.trainer import certify
from bebop.trainer.certify import Scored, block_of, score

VOCAB, STOPS, TEMPERATURE = 40, (39,), 0.8


def answers() -> list[Answer]:
    """Two answers to each of two prompts; those of the first agree for three tokens."""
    rng = np.random.default_rng(3)
    texts = [[5, 6, 7, 8, 9, 39], [5, 6, 7, 1, 2], [4], [11, 12, 12, 39]]
    return [
        Answer(
            request=2 * (10 + number // 2) + number % 2,
            prompt=((1, 2, 3), (4,))[number // 2],
            token_ids=np.array(tokens, dtype=np.int64),
            logprobs=rng.normal(size=len(tokens)),
            versions=np.zeros(len(tokens), dtype=np.int64),
        )
        for number, tokens in enumerate(texts)
    ]


def logits(number: int, answer: Answer) -> Tensor:
    """[prompt + answer, V], behind each token."""
    torch.manual_seed(number)
    return 3 * torch.randn(len(answer.prompt) + len(answer.token_ids), VOCAB)


def scored(places: dict[int, list[int]], temperature: float = TEMPERATURE) -> list[Scored]:
    parts = []
    for number, own in places.items():
        answer = answers()[number]
        rows, at = logits(number, answer), torch.tensor(own) + len(answer.prompt) - 1
        both = torch.stack([rows[at], rows[(at - 1).clamp_min(0)]])
        parts.append(score(number, answer, torch.tensor(own), both, temperature, STOPS))
    return parts


PLACES = {0: [1, 2, 5], 1: [0, 1, 2, 3, 4], 2: [0], 3: [2, 3]}


def block(temperature: float = TEMPERATURE) -> Block:
    return block_of(answers(), scored(PLACES, temperature), STOPS)


def wide(one: Block, table: Tensor) -> Tensor:
    """[N, V] of a narrowed table, the rest of each row spread evenly over all tokens without a column."""
    if one.ids is None:
        return table
    spread = (table[:, -1:] / (VOCAB + 1 - table.shape[1])).repeat(1, VOCAB)
    return spread.scatter(1, one.ids[:, :-1], table[:, :-1])


@pytest.mark.parametrize("columns", [1024, 12])
def test_every_column_is_what_it_says(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "COLUMNS", columns)
    found = block()
    flat = [(number, place) for number, own in PLACES.items() for place in own]
    assert len(found) == len(flat) and found.stops == STOPS
    assert found.request.tolist() == [answers()[number].request for number, _ in flat]
    assert found.position.tolist() == [place for _, place in flat]
    p, before, raw = (wide(found, getattr(found, name)) for name in ("probs", "before", "raw"))
    assert (found.ids is None) == (columns > VOCAB) and (found.probs.shape[1] == min(columns, VOCAB))
    for n, (number, place) in enumerate(flat):
        answer, rows = answers()[number], logits(number, answers()[number]).double()
        text = [*answer.prompt, *answer.token_ids.tolist()]
        at = len(answer.prompt) - 1 + place
        token = text[at + 1]
        assert found.tokens[n] == token and found.last[n] == text[at]
        own = (rows[at] / TEMPERATURE).softmax(0)
        assert float(found.logprobs[n]) == pytest.approx(float(own[token].log()), abs=1e-9)
        assert float(found.declared[n]) == float(found.logprobs[n]) and found.reported is not None
        assert float(found.reported[n]) == pytest.approx(float(answer.logprobs[place]))
        columns_of = list(range(VOCAB)) if found.ids is None else found.ids[n, :-1].tolist()
        earlier = (rows[max(0, at - 1)] / TEMPERATURE).softmax(0)
        for table, wanted in ((p, own), (before, earlier), (raw, rows[at].softmax(0))):
            assert float((table[n] - wanted)[columns_of].abs().max()) < 1e-9
            assert float(table[n].sum()) == pytest.approx(1)
        assert found.seen is not None
        assert found.seen[n, : len(columns_of)].tolist() == [v in text[: at + 1] for v in columns_of]
        if found.ids is not None:
            assert not found.seen[n, -1] and {text[at], *STOPS} <= set(columns_of)
            assert found.cells[n] == (columns_of.index(token) if token in columns_of else columns - 1)
            likely = torch.stack([own, earlier, rows[at].softmax(0)]).amax(0)
            assert set(likely.topk(4).indices.tolist()) <= set(columns_of)
        else:
            assert found.cells[n] == token


def test_columns_do_not_depend_on_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "COLUMNS", 12)
    answer = answers()[0]
    other = Answer(request=20, prompt=answer.prompt, token_ids=answer.token_ids.copy(), logprobs=answer.logprobs)
    other.token_ids[2] = 30
    both = torch.randn(2, 1, VOCAB)
    ids = [score(0, one, torch.tensor([2]), both, 1.0, STOPS).ids for one in (answer, other)]
    assert ids[0] is not None and ids[1] is not None and torch.equal(*ids)


def test_second_answers_are_held_against_the_first_where_they_agree() -> None:
    found = block()
    assert found.twin is not None
    flat = [(number, place) for number, own in PLACES.items() for place in own]
    twins = {at: int(twin) for at, twin in zip(flat, found.twin, strict=True) if twin >= 0}
    assert twins == {(1, 0): 5, (1, 1): 6, (1, 2): 7, (1, 3): 8}


def test_without_a_temperature_there_is_no_other_claim() -> None:
    assert block(1.0).raw is None and block(1.0).ids is None
