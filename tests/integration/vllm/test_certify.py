"""Certificates of a real vLLM server: with the plugin's mends it passes, with a fault it does not."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from bebop.certify.calls import Server
from bebop.certify.certificate import Certificate
from bebop.certify.model_reference import ModelReference
from bebop.certify.openai_server import OpenAIEngine
from bebop.certify.run import Plan, Run, plan_settings
from bebop.errors import UserError
from bebop.trajectory import SamplingParams
from tests.integration.vllm.serving import serving
from tests.served_models import VOCAB, job, reload
from tests.tree import ROOT

ALPHA, TOKENS = 1e-4, 12_000
CLAIM = SamplingParams(temperature=0.7, max_new_tokens=32, stop_token_ids=(VOCAB - 1,))


def prompt(index: int) -> Sequence[int]:
    return 3, 1, 4, 1 + index % 9


FAULTY = """
import inspect

from tests.integration.vllm.test_distributions import residual
from vllm.v1.sample import rejection_sampler


def register():
    own = rejection_sampler.rejection_sample
    names = inspect.signature(inspect.unwrap(own))
    rejection_sampler.rejection_sample = lambda *args, **named: residual(own, names.bind(*args, **named).arguments)
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
            return Run(engine, ModelReference(reload(folder)), prompt, plan).run()
        finally:
            engine.close()


def test_a_mended_server_passes(folder: Path, tmp_path: Path) -> None:
    found = certified(folder, tmp_path, {})
    assert found.structure == () and found.log_e < math.log(1 / ALPHA)
    found.require_pass()


def test_a_residual_that_is_the_target_fails(folder: Path, tmp_path: Path) -> None:
    assert certified(folder, tmp_path, plant(tmp_path)).verdict == "fail"


def test_what_stock_vllm_says_on_a_cpu_is_no_number(folder: Path, tmp_path: Path) -> None:
    """vllm#55005: drafts are verified at temperatures that happened to lie in memory, log-probs are NaN."""
    with pytest.raises(UserError, match="Out of range float"):
        certified(folder, tmp_path, {}, mended=False)
