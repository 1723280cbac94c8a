"""What the report computes: running mean, summary, scales."""

import pytest

from bebop.report.charts import Plot, plots
from bebop.report.figures import Panel, bar_trace, draw, line_trace, over_steps, running_mean, same_scale, whole_ticks
from bebop.report.runs import DASH, HEADS, Run, summary


def run(name: str = "r", config: dict[str, object] | None = None, **columns: list[float | None]) -> Run:
    """A run from columns; ``a__b`` stands for ``a/b``."""
    named = {key.replace("__", "/"): column for key, column in columns.items()}
    return Run(name=name, config=config or {}, steps=list(range(1, len(next(iter(named.values()))) + 1)), columns=named)


def plot(title: str, *runs: Run) -> Plot:
    """The chart of some runs with that title."""
    return next(one for one in plots(runs) if one.chart.title == title)


def titles(*runs: Run) -> set[str]:
    return {one.chart.title for one in plots(runs)}


def test_running_mean_looks_back_and_skips_gaps() -> None:
    assert running_mean([2.0, 4.0, None, 6.0], window=2) == [2.0, 3.0, 4.0, 6.0]
    assert running_mean([None, 1.0]) == [None, 1.0]


def test_summary_by_hand() -> None:
    config: dict[str, object] = {"model": {"path": "/models/smol/"}, "task": {"name": "gcd"}}
    config["decoding"] = {"system": "bebop", "draft_tokens": 3}
    reward = [0.2] * 5 + [0.5] * 5 + [0.8] * 10
    seconds = [30.0] * 10 + [90.0] * 10
    speed = [3000.0] * 10 + [1000.0] * 10
    got = summary(run(config=config, reward__mean=reward, time__step=seconds, rollout__tokens_per_s=speed))
    first = {"Run": "r", "Model": "smol", "Task": "gcd", "System": "bebop, K = 3", "Steps": "20"}
    # 1.2 million tokens in 20 minutes; the mean over steps would be 2,000.
    rest = {"Reward": "0.200 → 0.800 (+0.600)", "Accept length": DASH, "Tokens/s": "1,500", "Minutes": "20.0"}
    assert dict(zip(HEADS, got, strict=True)) == first | rest


@pytest.mark.parametrize(
    ("lengths", "shown"),
    [
        ([1.4], "1.40"),
        ([1.4, 4.5], "1.40 → 4.50 (+3.10)"),
        ([1.0, 2.0, 3.0, 4.0, 5.0], "1.50 → 4.00 (+2.50)"),
        ([1.0] * 4 + [5.0] * 4, "1.00 → 5.00 (+4.00)"),
        ([None, 1.0, None, None, 3.0, None], "1.00 → 3.00 (+2.00)"),  # numbers count, not steps
        ([1.0] * 5 + [3.0] * 5 + [5.0] * 5, "1.00 → 4.00 (+3.00)"),
        ([1.0] * 5 + [9.0] * 5 + [5.0] * 10, "1.00 → 5.00 (+4.00)"),
        ([None, None], DASH),
    ],
)
def test_first_and_last_steps_of_a_summary_have_none_in_common(lengths: list[float | None], shown: str) -> None:
    got = dict(zip(HEADS, summary(run(rollout__accept_length=lengths)), strict=True))
    assert got["Accept length"] == shown


def test_what_is_read_at_every_tenth_step_is_a_line_with_the_bar_that_it_is_held_against() -> None:
    sparse = [-1.0 if step % 10 == 0 else None for step in range(1, 301)]
    title = "Certificate of the completions"
    for runs in ([run(certify__log_e=sparse)], [run("a", certify__log_e=sparse), run("b", certify__log_e=sparse)]):
        figure = draw(plot(title, *runs), runs)
        *lines, bar = figure.panels[0].traces
        assert len(lines) == len(runs) and all(line["connectgaps"] for line in lines)
        assert bar["y"] == pytest.approx([9.21, 9.21], abs=0.01) and bar["x"] == [1, 300]
        assert figure.keys[-1].label.startswith("9.2") and figure.keys[-1].style == "dashed"
    short = run(certify__log_e=sparse[:60])
    few = draw(plot(title, short), [short]).panels[0]
    assert few.traces[0]["mode"] == "lines+markers"  # as there are six points, however many steps


@pytest.mark.parametrize(
    ("numbers", "each"), [([1, 2, 3], True), ([0], True), ([10, 20, 30, 40], False), ([*range(20)], False)]
)
def test_each_step_has_a_tick_only_where_they_lie_close_together(numbers: list[int], each: bool) -> None:
    assert ("dtick" in whole_ticks(numbers)) == each


def test_panels_of_several_runs_share_one_scale() -> None:
    runs = [
        run(name, policy__entropy=[top / 2, top], draft__entropy=[0.1, 0.2], rollout__target_entropy=[0.1, 0.3])
        for name, top in (("a", 1.0), ("b", 2.0))
    ]
    figure = draw(plot("Entropy", *runs), runs)
    assert [panel.caption.split(",")[0] for panel in figure.panels] == ["policy", "draft", "target"]
    assert all(panel.layout["yaxis"]["range"] == pytest.approx([0.0, 2.12]) for panel in figure.panels)


def test_bars_on_both_sides_of_zero_stay_inside_the_panel() -> None:
    bars = [bar_trace([1], [height], "", "") for height in (0.4, -0.6)]
    panels = [Panel(caption="", traces=[*bars, line_trace([1], [-0.2], "", "")], layout=over_steps([1]))] * 2
    low, high = same_scale(panels, zero=False)[0].layout["yaxis"]["range"]
    assert low <= -0.6 and high >= 0.4


def test_extra_positions_are_shown_where_there_are_any() -> None:
    plain, extra = run(reward__mean=[0.5]), run(rollout__extra_positions=[51.0])
    assert "Extra positions" not in titles(plain)
    assert [panel.caption for panel in draw(plot("Extra positions", plain, extra), [extra]).panels]


def test_what_a_system_counts_and_what_its_weights_cost_is_shown_where_it_is_logged() -> None:
    exact = run(train__loss=[0.1, 0.2], train__clip_frac=[0.0, 0.0])
    assert [panel.caption for panel in draw(plot("Update", exact), [exact]).panels] == [
        "loss",
        "clipped share of tokens",
    ]
    inexact = run(train__loss=[0.1], train__tis_ess=[0.9], rollout__overridden__1=[0.1], rollout__block_size__1=[5])
    assert [panel.caption for panel in draw(plot("Update", inexact), [inexact]).panels] == [
        "loss",
        "sample size of weights",
    ]
    own = {one.chart.title: one.chart.text for one in plots([inexact])}
    assert own["Overridden"].startswith("pad: share") and own["Block size"].startswith(
        "blockpilot, block_ema: mean size"
    )
    assert "Overridden" not in titles(exact)


def test_time_is_stacked_in_a_panel_for_each_run() -> None:
    numbers = {"rollout": 3.0, "update": 2.0, "sync": 0.1, "idle": 3.4, "monitor": 0.0, "step": 5.5}
    times: dict[str, list[float | None]] = {f"time__{name}": [value] for name, value in numbers.items()}
    runs = [run("a", **times), run("b", **{k: v for k, v in times.items() if k != "time__idle"})]
    figure = draw(plot("Where the time goes", *runs), runs)
    assert [[trace["type"] for trace in panel.traces] for panel in figure.panels] == [
        ["bar"] * 3 + ["scatter"] * 2,  # a bar that is always 0 has no entry in the legend
        ["bar"] * 2 + ["scatter"] * 2,
    ]
    assert figure.panels[0].layout["yaxis"]["range"][1] == pytest.approx(5.5 * 1.06)
    assert figure.missing == {"b": ["time/idle"]}
    evaluated = run("c", **times, time__eval=[0.5], eval__pass_at_1=[0.2])
    figure = draw(plot("Where the time goes", evaluated), [evaluated])
    assert [trace["type"] for trace in figure.panels[0].traces] == ["bar"] * 4 + ["scatter"] * 2
    assert draw(plot("Where the time goes", runs[0], evaluated), [runs[0], evaluated]).missing == {"a": ["time/eval"]}
    saving = run("d", **times, time__save=[0.3])
    figure = draw(plot("Where the time goes", runs[0], saving), [runs[0], saving])
    assert figure.missing == {"a": ["time/save"]}, "it is of an older version"
    assert [trace["type"] for trace in figure.panels[1].traces] == ["bar"] * 4 + ["scatter"] * 2
    assert "Held-out questions" in titles(evaluated) and "Held-out questions" not in titles(runs[0])


def test_a_flat_line_and_a_single_point_have_a_sensible_scale() -> None:
    flat = run(staleness__mean=[0.0], staleness__max=[0.0])
    layout = draw(plot("Staleness", flat), [flat]).panels[0].layout
    assert layout["yaxis"]["range"] == [0.0, 1.0]


def test_nothing_recorded_gives_no_panels() -> None:
    empty = run(reward__mean=[0.5], staleness__mean=[None])
    figure = draw(plot("Staleness", empty), [empty])
    assert figure.panels == [] and figure.keys == []
    assert figure.missing == {"r": ["staleness/mean", "staleness/max"]}


def test_what_a_system_counts_has_a_chart_of_its_own() -> None:
    columns = {"rollout__accept_rate__1": [0.8], "rollout__overridden__1": [0.1], "rollout__overridden__2": [0.2]}
    new = [one for one in plots([run(**columns)]) if one.chart.title not in titles(run(rollout__accept_rate__1=[0.8]))]
    assert [one.metrics for one in new] == [["rollout/overridden/1", "rollout/overridden/2"]]
