"""SGLang's nightly test: tokens sampled with speculation have the distribution of the model in CERTIFY_MODEL.

Drafts come from the MTP head of that model and are verified by rejection sampling, as in recipes/sglang/server.sh.
"""

import os

import pytest

sglang = pytest.importorskip("sglang")
MODEL = os.environ.get("CERTIFY_MODEL", "")
SETTINGS = os.environ.get("CERTIFY_SETTINGS", "quick=true").split()  # such as "quick=true model.device=cpu"
pytestmark = pytest.mark.skipif(not MODEL, reason="CERTIFY_MODEL names no folder of a model with MTP weights")
DRAFTS = {
    "speculative_algorithm": "NEXTN",
    "speculative_draft_model_path": MODEL,
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_use_rejection_sampling": True,
}


def test_sglang_draws_from_the_distribution_of_its_model(certify_engine):
    """Certify SGLang; anything but a pass raises."""
    engine = sglang.Engine(model_path=MODEL, mem_fraction_static=0.4, **DRAFTS)
    try:
        certify_engine(engine, MODEL, *SETTINGS).require_pass()
    finally:
        engine.shutdown()
