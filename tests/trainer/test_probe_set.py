"""A reading of the probe set against the distributions written out, context by context."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from bebop.config.job import DecodingConfig
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.mtp import chain
from bebop.monitor.probe_set import ProbeReading, ProbeText
from bebop.trainer.policy import PolicyTrainer
from bebop.trainer.probe_set import TEMPERATURES
from tests.trainer.builders import TEMPERATURE, batch, job, policy

TEXTS = (
    ProbeText(prompt=(3, 4, 5), answer=(6, 7, 8, 9, 10)),
    ProbeText(prompt=(1,), answer=(2, 3)),
    ProbeText(prompt=(9, 9, 1, 2), answer=tuple(range(20, 40))),
)


@torch.no_grad()
def by_hand(source: Policy, text: ProbeText, temperature: float, greedy: bool = False) -> list[tuple[float, float]]:
    """(acceptance, entropy) of the head's first step for every answer token that it can draft."""
    assert source.mtp is not None
    ids = torch.tensor([[*text.prompt, *text.answer]])
    hidden = source.hidden(ids, torch.arange(ids.shape[1])[None], CausalContext())
    drafted = source.logits(next(chain(source.mtp, source.embed(ids), hidden, 1)))[0] / temperature
    target = source.logits(hidden)[0] / temperature
    found = []
    for place in range(max(2, len(text.prompt)), ids.shape[1]):  # of the token that is drafted and verified
        q, p = drafted[place - 2].softmax(-1), target[place - 1].softmax(-1)
        rate = p[q.argmax()] if greedy else torch.minimum(p, q).sum()
        found.append((float(rate), float(-(p * p.log()).sum())))
    return found


def reader(source: Policy, **settings: dict[str, object]) -> PolicyTrainer:
    return PolicyTrainer(source, job(**settings))


@pytest.mark.parametrize("system", ["bebop", "target_only"])
def test_a_reading_by_hand(system: str) -> None:
    source = policy()
    wanted = [by_hand(source, text, TEMPERATURE, system == "target_only") for text in TEXTS]
    one = reader(source, trainer={"max_tokens": 16})
    reading, sweep = one.read_probe_set(TEXTS, decoding=DecodingConfig(system=system))
    flat = np.array([pair for part in wanted for pair in part])
    assert sweep is None and reading.unit is not None
    assert reading.unit.tolist() == [0] * 5 + [1] * 1 + [2] * 20  # the first token of a prompt of one has no draft
    np.testing.assert_allclose(reading.overlap, flat[:, 0], atol=2e-5)
    np.testing.assert_allclose(reading.entropy, flat[:, 1], atol=2e-5)
    assert one.scorer.kept is None


def test_token_probs_are_both_distributions_at_the_named_token() -> None:
    source = policy()
    texts = [dataclasses.replace(text, shown=shown) for text, shown in zip(TEXTS, (2, 1, 9), strict=True)]
    reading, _ = reader(source, trainer={"max_tokens": 16}).read_probe_set(texts)
    places = (2, 5 + 0, 5 + 1 + 9)  # among the contexts of all texts: a prompt of one token has no draft of its first
    assert [probs.text for probs in reading.token_probs] == [0, 1, 2]
    for probs, place, text in zip(reading.token_probs, places, texts, strict=True):
        assert probs.overlap == pytest.approx(reading.overlap[place], abs=1e-4)
        inside = sum(map(min, probs.target, probs.draft))
        assert inside <= probs.overlap + 1e-3 and len(set(probs.ids)) == len(probs.tokens) >= 6
        assert probs.target == tuple(sorted(probs.target, reverse=True)) and sum(probs.target) <= 1.001
        ids = [*text.prompt, *text.answer[: text.shown]]
        assert probs.context == source.tokenizer.decode(ids[-16:])
    assert ProbeReading.from_row(json.loads(json.dumps(reading.to_row()))).token_probs == reading.token_probs


def test_a_sweep_divides_the_same_logits() -> None:
    source = policy()
    reading, sweep = reader(source).read_probe_set(TEXTS, sweep=True)
    assert sweep is not None and len(sweep.readings) + 1 == len(TEMPERATURES) == len(sweep.entropy) == len(sweep.length)
    for found, temperature in zip((reading, *sweep.readings), TEMPERATURES, strict=True):
        wanted = np.array([pair for text in TEXTS for pair in by_hand(source, text, TEMPERATURE * temperature)])
        np.testing.assert_allclose(found.overlap, wanted[:, 0], atol=2e-5)
        np.testing.assert_allclose(found.entropy, wanted[:, 1], atol=2e-5)
    assert sweep.entropy[0] == pytest.approx(reading.entropy.mean())
    assert 1 + reading.overlap.mean() < sweep.length[0] < 1 + 3 * reading.overlap.mean()
    assert reading.chance is not None and 0 < reading.chance < 1 and sweep.readings[0].chance is None


def test_a_tree_is_swept_as_deep_as_it_goes() -> None:
    """Seven nodes are no seven steps."""
    shape = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0]]
    tree = DecodingConfig(system="bebop_tree", draft_tokens=7, options={"shape": shape})
    chains = [DecodingConfig(draft_tokens=drafts) for drafts in (2, 7)]
    found = [reader(policy()).read_probe_set(TEXTS, sweep=True, decoding=d)[1] for d in (tree, *chains)]
    lengths = [sweep.length[0] for sweep in found if sweep is not None]
    assert lengths[0] == lengths[1] < lengths[2] - 1e-3
    assert tree.depth == 2 and DecodingConfig(system="bebop_tree", draft_tokens=1).depth == 1


def test_answers_to_one_prompt_are_one_unit() -> None:
    """They resemble one another: what is resampled are prompts."""
    again = ProbeText(prompt=TEXTS[0].prompt, answer=(20, 21, 22, 23, 24, 25))
    reading, sweep = reader(policy()).read_probe_set([*TEXTS, again], sweep=True)
    assert reading.unit is not None and reading.unit.tolist() == [0] * 5 + [1] + [2] * 20 + [0] * 6
    assert sweep is not None and sweep.sums is not None and sweep.sums.shape == (len(TEMPERATURES), 3, 4)
    assert sweep.sums[0, :, 3].tolist() == [11, 1, 20]
    for temperature, found in enumerate((reading, *sweep.readings)):
        wanted = np.bincount(reading.unit, found.entropy)
        np.testing.assert_allclose(sweep.sums[temperature, :, 2], wanted, rtol=1e-9)
    length, count, entropy, contexts = np.moveaxis(sweep.sums.sum(1), 1, 0)
    assert sweep.entropy == pytest.approx(entropy / contexts) and sweep.length == pytest.approx(length / count)


def test_reading_leaves_the_trainer_alone() -> None:
    """Also between two updates, and with the draft's own temperature."""
    plain, read = reader(policy()), reader(policy())
    read.read_probe_set(TEXTS, sweep=True, decoding=dataclasses.replace(DecodingConfig(), draft_temperature=0.5))
    for one in (plain, read):
        one.update(batch())
    ours, theirs = plain.weights(mtp=True), read.weights(mtp=True)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    before, after = reader(policy()).read_probe_set(TEXTS)[0], read.read_probe_set(TEXTS)[0]
    assert np.abs(before.overlap - after.overlap).max() > 1e-3, "an update moves the reading"
