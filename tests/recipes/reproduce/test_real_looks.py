"""A look at several samplings at once against probes one by one, and drafts at temperatures of their own against sums
over all tokens and all drafts."""

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.adaptation.probe import NUMBERS, probe
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead
from bebop.trainer.objectives import Sampling
from recipes.reproduce.real import evaluation, looks
from recipes.reproduce.real.evaluation import (
    Evaluated,
    drafts_path,
    has_drafts,
    look_at,
    read_chains,
    read_drafts,
    write_drafts,
)
from recipes.reproduce.real.heads import BEST, save
from recipes.reproduce.real.looks import NOTHING, accepted, look
from recipes.reproduce.real.runs import all_runs
from recipes.reproduce.real.starts import fitted
from recipes.reproduce.real.states import Text
from tests.recipes.reproduce.real_builders import head_run, small_study

SAMPLINGS = [Sampling(), Sampling(temperature=0.4), Sampling(temperature=1.4), Sampling(target_top_p=0.9)]
DRAFTS = (0.0, 0.2, 0.6, 1.0)
FILES = [(file, split) for file in (BEST, "step-00100.safetensors") for split in ("test", "unseen")]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Text]:
    model, text = small_study(tmp_path_factory.mktemp("real"))
    policy = replace(model, mtp=MTPHead(model.backbone))
    fitted(policy, [answer.row for answer in text.answers[:8]])
    return policy, text


@pytest.mark.slow
def test_a_look_at_several_samplings_is_a_probe_at_each(study: tuple[Policy, Text]) -> None:
    policy, text = study
    rows = [answer.row for answer in text.answers]
    found, drafts = look(policy, rows, 3, SAMPLINGS, text.states, every=2, drafts=DRAFTS)
    for sampling, one in zip(SAMPLINGS, found, strict=True):
        truth = probe(policy, rows, 3, sampling, states=text.states, every=2)
        assert np.array_equal(one.row, truth.row) and np.array_equal(one.place, truth.place)
        assert np.array_equal(one.task, truth.task)
        for name in NUMBERS:
            assert np.allclose(one.numbers[name], truth.numbers[name], atol=2e-5, equal_nan=True), (sampling, name)
        assert np.allclose(one.accept, truth.accept, atol=1e-4)
        assert np.array_equal(one.accept_greedy, truth.accept_greedy)
    plain = found[0]
    assert np.allclose(drafts.overlap[..., -1], plain.numbers["overlap"], atol=1e-6, equal_nan=True)
    assert np.allclose(drafts.accept[:, -1], plain.accept, atol=1e-5)
    assert np.allclose(drafts.overlap[..., 0], plain.numbers["target_only"], atol=1e-6, equal_nan=True)
    assert not np.allclose(drafts.overlap[..., 1], plain.numbers["overlap"], atol=0.01, equal_nan=True)


def test_a_cut_distribution_that_lacks_a_token_of_the_target_has_an_infinite_divergence() -> None:
    q, p = torch.tensor([[5.0, 1.0, 0.0]]), torch.tensor([[1.0, 0.9, -5.0]])
    some = (q, p, torch.tensor([1]), torch.tensor([0]))
    assert looks._pair(*some, Sampling(target_top_p=0.9))["kl_pq"].isinf()
    assert looks._pair(*some, Sampling())["kl_pq"].isfinite()
    assert torch.zeros(1) * NOTHING == 0


def test_drafts_at_a_temperature_are_accepted_with_the_overlap() -> None:
    """Broken: the temperature on the target as well."""
    torch.manual_seed(0)
    q, p, y = 3 * torch.randn(6, 11), 2 * torch.randn(6, 11), torch.randint(0, 11, (6,))
    found = looks._cold(q, p, y, q.argmax(-1), DRAFTS)
    for t in DRAFTS:
        draft = (q / t).softmax(-1) if t else torch.nn.functional.one_hot(q.argmax(-1), 11).float()
        target = p.softmax(-1)
        assert torch.allclose(found[f"overlap {t}"], torch.minimum(draft, target).sum(-1), atol=1e-6)
        label = [x.gather(1, y[:, None])[:, 0] for x in (draft, target)]
        assert torch.allclose(found[f"ratio {t}"], (label[0] / label[1]).clamp_max(1), atol=1e-5)
        wrong = torch.minimum(draft, (p / (t or 1)).softmax(-1)).sum(-1)
        assert t in (0, 1) or not torch.allclose(found[f"overlap {t}"], wrong, atol=0.01)


def chain(seed: int) -> tuple[dict[tuple[int, ...], Tensor], dict[tuple[int, ...], Tensor]]:
    """Draft and target over three tokens after every text of up to two tokens."""
    torch.manual_seed(seed)
    before = [text for length in range(3) for text in product(range(3), repeat=length)]
    return {t: torch.randn(3) for t in before}, {t: torch.randn(3).softmax(-1) for t in before}


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_the_estimate_is_unbiased_at_every_draft_temperature(temperature: float) -> None:
    """Over all texts of the target, against the sum over all drafts. Broken: ratios of the draft at temperature 1."""
    logits, target = chain(3)
    first = {text: torch.nn.functional.one_hot(z.argmax(), 3).float() for text, z in logits.items()}
    draft = {t: (z / temperature).softmax(-1) for t, z in logits.items()} if temperature else first
    # A draft y is emitted and accepted with min(p, q)(y); the chain then goes on from it.
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    for text in [t for t in target if len(t) < 2]:
        both = torch.minimum(draft[text], target[text])
        reached |= {(*text, y): reached[text] * float(both[y]) for y in range(3)}
    truth = 1 + sum(reached[t] * float(torch.minimum(draft[t], target[t]).sum()) for t in target)

    def estimated(source: dict[tuple[int, ...], Tensor]) -> float:
        total = 0.0
        for y in product(range(3), repeat=3):
            texts = [y[:k] for k in range(3)]
            chance = np.prod([float(target[t][y[k]]) for k, t in enumerate(texts)])
            ratio = [[min(1.0, float(source[t][y[k]] / target[t][y[k]])) for k, t in enumerate(texts)]]
            overlap = [[float(torch.minimum(draft[t], target[t]).sum()) for t in texts]]
            total += chance * accepted(np.array(ratio), np.array(overlap))[0]
        return total

    assert estimated(draft) == pytest.approx(truth)
    if temperature != 1:
        assert abs(estimated({t: z.softmax(-1) for t, z in logits.items()}) - truth) > 0.01


@pytest.mark.slow
def test_colder_drafts_go_from_sampled_to_greedy_ones(study: tuple[Policy, Text]) -> None:
    policy, text = study
    _, found = look(policy, [a.row for a in text.answers], 2, [], text.states, drafts=(0.0, 0.001, 0.01, 1.0))
    apart = [np.nanmean(np.abs(found.overlap[..., i] - found.overlap[..., 0])) for i in (1, 2, 3)]
    assert apart[0] < 1e-3 and all(a <= b for a, b in pairwise(apart))


def test_drafts_are_kept_as_they_are(study: tuple[Policy, Text], tmp_path: Path) -> None:
    policy, text = study
    _, found = look(policy, [a.row for a in text.answers], 2, [], text.states, every=4, drafts=DRAFTS)
    write_drafts(tmp_path / "here" / "x.npz", found)
    again = read_drafts(tmp_path / "here" / "x.npz")
    assert again.temperatures == DRAFTS and np.array_equal(again.task, found.task)
    assert np.allclose(again.overlap, found.overlap, atol=1e-6, equal_nan=True)
    assert again.accept == pytest.approx(found.accept)


def test_best_heads_of_two_losses_are_looked_at_with_draft_temperatures(tmp_path: Path) -> None:
    asked = [
        (run, Evaluated(head=run.name, file=f, sampling=Sampling(), split=s)) for run in all_runs() for f, s in FILES
    ]
    found = [drafts_path(tmp_path, run.name).name for run, each in asked if has_drafts(run, each)]
    assert sorted(found) == [f"{name}-{seed}, best, drafts, test.npz" for name in ("ce", "e2e_tv") for seed in range(6)]


@pytest.mark.slow
def test_heads_are_looked_at_for_what_is_missing(study: tuple[Policy, Text], tmp_path: Path) -> None:
    policy, text = study
    run = head_run("ce-0", start="shared")
    save(run.folder(tmp_path) / BEST, dict(policy.mtp.named_parameters()) if policy.mtp else {})
    asked = [Evaluated(head="ce-0", file=BEST, sampling=sampling, split="test") for sampling in SAMPLINGS]
    part = text.at(range(len(text.answers)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "EVERY", 2)
        look_at(run, asked, tmp_path, policy, part)
        paths = [drafts_path(tmp_path, "ce-0"), *(each.path(tmp_path) for each in asked)]
        stamps = [path.stat().st_mtime_ns for path in paths]
        paths[0].unlink()
        paths[2].unlink()
        look_at(run, asked, tmp_path, policy, part)
    again = [path.stat().st_mtime_ns for path in paths]
    assert [a == b for a, b in zip(stamps, again, strict=True)] == [False, True, False, True, True]
    cold, plain, colder = read_drafts(paths[0]), read_chains(paths[1]), read_chains(paths[2])
    assert np.allclose(cold.overlap[..., -1], plain.numbers["overlap"], atol=1e-5, equal_nan=True)
    assert np.nanmean(colder.numbers["target_entropy"]) < np.nanmean(plain.numbers["target_entropy"])
    with pytest.raises(UserError, match="each 1000000-th of 28 answers, and none is long enough"):
        look(policy, [a.row for a in part.answers], 2, [], part.states, every=10**6)
