"""What environments add to the predictions of a recipe."""

from pathlib import Path

import pytest

from recipes.cluster.prediction import waiting
from recipes.cluster.recipe import load
from tests.recipes.test_cluster import variant


@pytest.mark.slow
def test_what_environments_add_by_hand(tmp_path: Path) -> None:
    """At no wait an engine has its rows open and nothing waits; what more waits takes its contexts in memory."""
    agents = "512-gpus-8b-agents"
    busy = waiting(load(variant(tmp_path, agents, ("environment_seconds: 2.0", "environment_seconds: 0.0")), tmp_path))
    assert busy == {"waiting_seconds": 0.0, "open_trajectories": 24.0, "waiting_gb": 0.0}
    recipe = load(agents)
    found, lengths = waiting(recipe), recipe.roofline.lengths
    assert found["waiting_seconds"] == 200 * 2.0
    # 37 layers of 8 heads of 128 numbers, keys and values, two bytes; half of it on each of two GPUs.
    each = 37 * 8 * 128 * 2 * 2 * lengths.context / 2 / 1e9
    assert found["waiting_gb"] == pytest.approx((found["open_trajectories"] - 24) * each)
    longer = waiting(
        load(variant(tmp_path, agents, ("environment_seconds: 2.0", "environment_seconds: 4.0")), tmp_path)
    )
    assert longer["open_trajectories"] - 24 == pytest.approx(2 * (found["open_trajectories"] - 24))
    assert waiting(load("64-gpus-8b-reasoning")) == {}
