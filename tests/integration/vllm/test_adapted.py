"""vLLM samples the corpus of an adaptation, and drafts with the head that was trained on it."""

from pathlib import Path

import pytest

from tests.integration.adapting import corpus_test
from tests.integration.vllm.builders import engine
from tests.served_models import job

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["mimo", "glm4_moe"])
def test_a_corpus_of_vllm_trains_a_head_that_drafts_there(family: str, tmp_path: Path) -> None:
    corpus_test("vllm", family, tmp_path, lambda folder: engine(job(folder)))
