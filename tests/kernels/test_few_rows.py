"""Products of few rows on a CPU: close to fp64, a row whatever is beside it, and what happens without a compiler."""

import logging
from collections.abc import Iterator

import pytest
import torch

from bebop.config.job import DecodingConfig
from bebop.kernels import few_rows
from bebop.model import backbone
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.trajectory import SamplingParams
from tests.builders import tiny_policy

SHAPES = [(96, 64), (97, 77), (5, 7), (3, 1601), (1, 16)]
needs_kernel = pytest.mark.skipif(not few_rows.available(), reason="needs AVX-512 and a C++ compiler")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_close_to_fp64_and_a_row_is_the_same_whatever_is_beside_it(outputs: int, inputs: int, biased: bool) -> None:
    torch.manual_seed(outputs)
    x, weight = torch.randn(few_rows.MAX_ROWS, inputs), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if biased else None
    wanted = few_rows.reference(x, weight, bias)
    single = torch.cat([few_rows.few_rows(row[None], weight, bias) for row in x])
    assert (single - wanted).abs().max() < 1e-6 * inputs**0.5 * 8
    for rows in range(1, few_rows.MAX_ROWS + 1):
        assert torch.equal(few_rows.few_rows(x[:rows], weight, bias), single[:rows])
        assert torch.equal(few_rows.few_rows(x[-rows:], weight, bias), single[-rows:])
    apart = x.T.contiguous().T  # columns lie one after the other
    assert not apart.is_contiguous() or inputs == 1
    assert torch.equal(few_rows.few_rows(apart, weight, bias), single)


@needs_kernel
@pytest.mark.parametrize("outputs", [1, 2, 13, 64])
def test_threads_change_nothing(outputs: int, threads: None) -> None:
    x, weight = torch.randn(3, 40), torch.randn(outputs, 40)
    torch.set_num_threads(1)
    alone = few_rows.few_rows(x, weight)
    for count in (2, 3, 5):
        torch.set_num_threads(count)
        assert torch.equal(few_rows.few_rows(x, weight), alone)


@needs_kernel
def test_matrices_of_decoding_take_it_and_see_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a policy that is loaded anew: an engine that decodes with old weights would give the old tokens."""
    monkeypatch.setattr(few_rows, "SMALLEST", 1)
    used: list[int] = []
    own = few_rows.few_rows

    def watched(x: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        used.append(len(x))
        return own(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(few_rows, "few_rows", watched)

    def logprobs(engine: TorchEngine) -> list[float]:
        params = SamplingParams(max_new_tokens=6, seed=3)
        engine.add(Request(id=0, token_ids=(1, 2, 3), params=params))
        (found,) = [each for _ in range(8) for each in engine.step()]
        return list(found.completion.logprobs)

    def made(seed: int) -> TorchEngine:
        return TorchEngine(tiny_policy(seed=seed), DecodingConfig(system="autoregressive"), slots=1, max_length=16)

    one, other = made(0), made(1)
    first = logprobs(one)
    assert used and max(used) <= few_rows.MAX_ROWS
    one.load_weights(tiny_policy(seed=1).weights(mtp=True), 1)
    again = logprobs(one)
    assert again == logprobs(other) and again != first


def test_only_large_fp32_matrices_in_one_piece_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "available", lambda: True)
    large = torch.empty(512, 512)
    assert few_rows.suits(large)
    assert not few_rows.suits(large[:-1]) and not few_rows.suits(large.bfloat16()) and not few_rows.suits(large.T)
    assert not few_rows.suits(large.double())
    monkeypatch.setattr(few_rows, "available", lambda: False)
    assert not few_rows.suits(large)


@pytest.mark.parametrize("command", [None, "false"])
def test_without_a_compiler_libraries_multiply_and_the_log_says_so_once(
    command: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``false`` is a compiler that fails."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr("shutil.which", lambda name: command)
    monkeypatch.setattr(few_rows, "SMALLEST", 1)
    few_rows._kernel.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, few_rows.__name__):
            x, weight = torch.randn(2, 8), torch.randn(4, 8)
            for _ in range(2):
                assert torch.equal(backbone.product(x, weight), backbone.by_library(x, weight))
                assert backbone.Matrix(weight).few == 0
        (warning,) = caplog.messages
        assert "slower" in warning and "\n" not in warning and (command or "compiler") in warning
    finally:
        few_rows._kernel.cache_clear()


def test_the_setting_that_forbids_compilers_forbids_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_kernel", lambda: pytest.fail("asked for the kernel"))
    monkeypatch.setenv("BEBOP_COMPILE", "0")
    assert not few_rows.available()
