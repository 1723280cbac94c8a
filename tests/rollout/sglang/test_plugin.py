"""The plugin's numbers, from made-up steps; whether SGLang calls it is tested in tests/integration/sglang."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bebop.rollout.sglang import plugin
from bebop.rollout.sglang.plugin import Measure, statistics

B, K, V = 3, 2, 7


def step(seed: int = 0, greedy: bool = False, drafts: bool = True):
    """Arguments of ``eagle_sample``, and what it returns."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.rand(B, K, V, generator=generator).softmax(-1)
    drafted = q.argmax(-1)
    verify = SimpleNamespace(
        draft_probs=q if drafts else None,
        draft_token_num=K + 1,
        draft_token=torch.cat([torch.zeros(B, 1).long(), drafted], 1).flatten(),
    )
    sampling = SimpleNamespace(
        temperatures=torch.tensor([[0.5], [1.0], [2.0]]),
        need_top_k_sampling=False,
        need_top_p_sampling=False,
        is_all_greedy=greedy,
    )
    batch = SimpleNamespace(sampling_info=sampling, forward_mode=SimpleNamespace(is_idle=lambda: False))
    logits = torch.randn(B * (K + 1), V, generator=generator)
    output = SimpleNamespace(next_token_logits=logits, customized_info=None)
    return verify, batch, output


def original(verify, batch, logits, *args, **kwargs):
    """Stands for ``eagle_sample``, which adds penalties and masks to the logits in place."""
    logits.next_token_logits[:, 0] = -1e9
    return torch.zeros(1), torch.tensor([1, 2, 3]), torch.zeros(1)


def measured(**arguments):
    verify, batch, output = step(**arguments)
    Measure(1, lambda: True)(original, verify, batch, output)
    return verify, batch, output


@pytest.mark.parametrize("requests", [1, 2, B])
def test_entries_are_the_distributions_that_were_verified(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number of requests is measured at a time."""
    monkeypatch.setattr(plugin, "SLICE", requests * (K + 1) * V)
    verify, batch, output = measured()
    entries = output.customized_info["bebop_verify"]
    assert [entry["accepted"] for entry in entries] == [0, 1, 2]
    for b, entry in enumerate(entries):
        temperature = float(batch.sampling_info.temperatures[b])
        for k in range(K):
            z = output.next_token_logits[b * (K + 1) + k].double() / temperature
            p, q = z.softmax(-1), verify.draft_probs[b, k].double()
            assert p[0] < 1e-6  # the mask was in
            wanted = {
                "overlap": torch.minimum(p, q).sum(), "target_only": p[q.argmax()],
                "draft_entropy": -(q * q.log()).sum(), "target_entropy": -(p * (p + 1e-300).log()).sum(),
            }  # fmt: skip
            for name, value in wanted.items():
                assert abs(entry[name][k] - float(value)) < 1e-5, name


def test_a_row_too_far_would_be_noticed() -> None:
    """The broken variant: target distributions shifted by one position give other numbers."""
    verify, _, output = measured()
    p = output.next_token_logits.softmax(-1).view(B, K + 1, V)
    drafted = verify.draft_token.view(B, K + 1)[:, 1:]
    right, shifted = (statistics(verify.draft_probs, part, drafted).overlap for part in (p[:, :-1], p[:, 1:]))
    assert (right - shifted).abs().max() > 0.01


def test_greedy_drafts_are_one_hot() -> None:
    verify, batch, output = measured(drafts=False)
    p = output.next_token_logits.view(B, K + 1, V)[:, :-1] / batch.sampling_info.temperatures[:, None]
    wanted = p.softmax(-1).gather(-1, verify.draft_token.view(B, K + 1)[:, 1:, None])[..., 0]
    for b, entry in enumerate(output.customized_info["bebop_verify"]):
        np.testing.assert_allclose(entry["overlap"], wanted[b], atol=1e-6)
        np.testing.assert_allclose(entry["target_only"], wanted[b], atol=1e-6)
        assert entry["draft_entropy"] == [0.0, 0.0]


def test_one_step_in_so_many_is_measured() -> None:
    measure = Measure(3, lambda: True)
    found = []
    for _ in range(7):
        verify, batch, output = step()
        measure(original, verify, batch, output)
        found.append(output.customized_info is not None)
    assert found == [True, False, False, True, False, False, True]
    verify, batch, output = step()
    Measure(3, lambda: True)(original, verify, batch, output)
    assert output.customized_info["bebop_verify"][0]["weight"] == 3


def test_what_has_no_distributions_is_left_alone() -> None:
    assert measured(greedy=True)[2].customized_info is None
    verify, batch, output = step()
    verify.tree_topk = 4
    Measure(1, lambda: True)(original, verify, batch, output)
    assert output.customized_info is None, "a tree's rows are nodes, and not positions"
    verify.tree_topk = 1
    batch.forward_mode = SimpleNamespace(is_idle=lambda: True)
    Measure(1, lambda: True)(original, verify, batch, output)
    assert output.customized_info is None
    verify, batch, output = step()
    output.customized_info = {"other": [1, 2, 3]}
    Measure(1, lambda: True)(original, verify, batch, output)
    assert set(output.customized_info) == {"other", "bebop_verify"}
    verify, batch, output = step()
    Measure(1, lambda: False)(original, verify, batch, output)
    assert output.customized_info is None


def test_the_result_is_sglangs_own() -> None:
    verify, batch, output = step()
    found = Measure(1, lambda: True)(lambda *args, **kwargs: original(*args), verify, batch, output, None, extra=1)
    assert found[1].tolist() == [1, 2, 3]


@pytest.mark.parametrize("every", [None, "", "0"])
def test_nothing_happens_unasked(monkeypatch: pytest.MonkeyPatch, every: str | None) -> None:
    """SGLang may be there for somebody else: nothing of it is touched, or even imported."""
    monkeypatch.delenv(plugin.CPU, raising=False)
    monkeypatch.delenv(plugin.EVERY, raising=False)
    if every is not None:
        monkeypatch.setenv(plugin.EVERY, every)
    monkeypatch.setitem(sys.modules, "sglang", None)  # importing it raises
    plugin.register()
    monkeypatch.setenv(plugin.EVERY, "4")
    with pytest.raises(ImportError):
        plugin.register()
