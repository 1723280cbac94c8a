"""vLLM's nightly test: tokens sampled with speculation have the distribution of the model in CERTIFY_MODEL."""

import os

import pytest

vllm = pytest.importorskip("vllm")
MODEL = os.environ.get("CERTIFY_MODEL", "")
SETTINGS = os.environ.get("CERTIFY_SETTINGS", "quick=true").split()  # such as "quick=true model.device=cpu"
pytestmark = pytest.mark.skipif(not MODEL, reason="CERTIFY_MODEL names no folder of a model")
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def test_vllm_draws_from_the_distribution_of_its_model(certify_engine):
    """Certify vLLM; anything but a pass raises."""
    llm = vllm.LLM(MODEL, speculative_config=DRAFTS, gpu_memory_utilization=0.4)
    certify_engine(llm, MODEL, *SETTINGS).require_pass()
