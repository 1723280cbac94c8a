"""Published speed-ups: what is stored is what is predicted, and the rule can be missed."""

import json

import pytest

from bebop.bench.published.__main__ import FOLDER, compare, fit, predicted, read, sign, verdict
from bebop.simulation.roofline import GPUS


def stored() -> dict[str, object]:
    return json.loads((FOLDER / "pays.json").read_text())


def test_the_stored_table_is_what_is_predicted() -> None:
    rows = compare(read())
    for row, kept in zip(rows, stored()["rows"], strict=True):
        assert row["point"] == kept["point"] and row["predicted"] == pytest.approx(kept["predicted"], rel=1e-3)
    found = verdict(rows)
    assert {name: found[name] for name in ("judged", "W1", "W2", "W3")} == {
        name: stored()["verdict"][name] for name in ("judged", "W1", "W2", "W3")
    }
    assert found["W1"] == found["W2"] == found["W3"] == "holds", "docs/will_it_pay.md says so in prose"
    assert found["judged"] >= 8 and {"named", "stated", "borrowed", "fitted"} == {row["group"] for row in rows}


def test_the_rule_can_be_missed() -> None:
    rows = compare(read())
    wrong = [{**row, "sign": "wrong"} if row["point"] == "skyrl-rollout" else row for row in rows]
    assert verdict(wrong)["W1"] == "missed" and verdict(wrong)["W2"] == verdict(rows)["W2"]
    off = [{**row, "error": row["error"] + 0.5} for row in rows]
    assert verdict(off)["W2"] == verdict(off)["W3"] == "missed"
    assert [sign(x) for x in (0.97, 0.99, 1.01, 1.03)] == [-1, 0, 0, 1]


def test_two_constants_are_fitted_each_on_one_point() -> None:
    content = read()
    found = fit(content)
    assert list(content["fit"]) == list(found)
    assert all(float(f"{value:.2g}") == getattr(GPUS["h100"], name) for name, value in found.items())
    points = {point["id"]: point for point in content["points"]}
    assert all(
        predicted(points[name]) == pytest.approx(points[name]["published"], rel=0.01)
        for name in content["fit"].values()
    )
