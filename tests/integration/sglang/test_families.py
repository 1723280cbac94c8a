"""MTP heads of families in SGLang's own classes: the same numbers as Bebop's, and new weights in every layer."""

from typing import Any

import pytest

from bebop.rollout.sglang.backend import INTERPRETER
from tests.integration import heads

pytestmark = pytest.mark.slow
EMBEDS_THE_FIRST = ("deepseek_v3", "glm4_moe")  # SGLang's classes read the embedding at position 0; vLLM's do not


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, heads.Head]:
    root = tmp_path_factory.mktemp("families")
    return {
        name: heads.write(root, name, zero_first=False if name in EMBEDS_THE_FIRST else None) for name in heads.SERVED
    }


@pytest.fixture(scope="module")
def found(written: dict[str, heads.Head]) -> dict[str, Any]:
    root = next(iter(written.values())).folder.parent
    return heads.run("tests.integration.sglang.run_heads", root, written, INTERPRETER)


# DeepSeek-V3's latent attention needs a running engine; that its weights find their places is seen below.
@pytest.mark.parametrize("family", [name for name in heads.SERVED if name != "deepseek_v3"])
def test_the_forward_is_that_of_bebop(written: dict[str, heads.Head], found: dict[str, Any], family: str) -> None:
    heads.check_forward(written[family], found)


@pytest.mark.parametrize("family", heads.SERVED)
def test_new_weights_reach_every_layer(written: dict[str, heads.Head], found: dict[str, Any], family: str) -> None:
    heads.check_update(written[family], found)
