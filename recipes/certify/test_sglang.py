"""SGLang's nightly test: tokens sampled with speculation have the distribution of the model in CERTIFY_MODEL."""

import os

import pytest

sglang = pytest.importorskip("sglang")
MODEL = os.environ.get("CERTIFY_MODEL", "Qwen/Qwen3-0.6B")
SETTINGS = os.environ.get("CERTIFY_SETTINGS", "quick=true").split()  # such as "quick=true model.device=cpu"


def test_sglang_draws_from_the_distribution_of_its_model(certify_engine):
    """Certify SGLang; anything but a pass raises."""
    engine = sglang.Engine(model_path=MODEL, speculative_algorithm="NGRAM", mem_fraction_static=0.4)
    try:
        certify_engine(engine, MODEL, *SETTINGS).require_pass()
    finally:
        engine.shutdown()
