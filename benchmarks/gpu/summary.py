"""Summary page of a GPU run: the measurements as ratios, and the consequence of each."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bebop.bench.gpu.headline import page as headline_page

Row = dict[str, Any]


def summary(folder: Path, where: Mapping[str, object], outcomes: Mapping[str, str]) -> str:
    """Return the page, from the files of the finished stages."""
    files = {file.stem.partition("_")[2]: json.loads(file.read_text()) for file in sorted(folder.glob("?_*.json"))}
    stages: dict[str, list[Row]] = {name: content["rows"] for name, content in files.items()}
    place = next(iter(files.values()))["place"] if files else {}
    dry = any(content["dry"] for content in files.values())
    lines = ["# What a GPU run showed", ""]
    if dry:
        lines += ["**A dry run on a CPU with tiny shapes: no number here means anything.**", ""]
    about = {"device": place.get("device"), **where, "cuda": place.get("cuda"), "triton": place.get("triton")}
    lines += [", ".join(f"{name} {value}" for name, value in about.items() if value is not None), ""]
    lines += [f"- {name}: {outcome}" for name, outcome in outcomes.items()] + [""]
    for name, tell in SAID.items():
        if name in stages:
            lines += [f"## {name}", "", *tell(stages[name]), ""]
    unsteady = [f"{name}: {row['what']}" for name, rows in stages.items() for row in rows if row.get("steady") is False]
    skipped = [
        f"{name}: {row['what']}: {row['skipped']}"
        for name, rows in stages.items()
        for row in rows
        if row.get("skipped")
    ]
    lines += [f"Not steady (two medians differ by 5 % or more): {'; '.join(unsteady) or 'none'}.", ""]
    lines += ["Left out:", *[f"- {line}" for line in skipped]] if skipped else ["Nothing was left out."]
    return "\n".join(lines) + "\n"


def value(rows: list[Row], what: str, **about: object) -> float | None:
    """Return the value of the first row of this kind, or None."""
    return next(
        (row["value"] for row in rows if row["what"] == what and all(row.get(k) == v for k, v in about.items())), None
    )


def _ratio(a: float | None, b: float | None) -> str:
    return "unknown" if not a or not b else f"{a / b:.2f}"


def _card(rows: list[Row]) -> list[str]:
    shown = ("copy GB/s", "bf16 TFLOP/s", "us an eager operation", "us a kernel in a graph", "us a read of one number")
    lines = [f"- {what}: {found:.4g}" for what in shown if (found := value(rows, what)) is not None]
    operation = value(rows, "us an eager operation")
    if operation:
        lines.append(
            f"- So {'graphs come first' if operation > 8 else 'graphs can wait'}: the bar is 8 us an operation."
        )
    return lines


def _tests(rows: list[Row]) -> list[str]:
    failed = value(rows, "failed")
    lines = [f"- {line}" for row in rows for line in row.get("lines", [])]
    return ["- All passed." if failed == 0 else f"- **{failed} failed: mend these before anything else.**", *lines]


def _tv(rows: list[Row]) -> list[str]:
    alone, folded, whole = (
        value(rows, what) for what in ("kernel alone", "whole, weights folded in", "whole, upstream weights")
    )
    before, now = value(rows, "multiplication as it was"), value(rows, "multiplication")
    best = min(
        (row for row in rows if row["what"] == "kernel alone" and row["value"]), key=lambda r: r["value"], default=None
    )
    lines = [
        f"- Of the whole with upstream weights, the kernel alone takes {_ratio(alone, whole)}, weights folded in "
        f"{_ratio(folded, whole)}; the multiplication takes {_ratio(now, before)} of what it took.",
        *([f"- The whole takes {whole:.4g} ms; before its new arithmetic 9.16 ms on an H200."] if whole else []),
    ]
    if best is not None:
        lines.append(
            f"- Best launch: block {best.get('block', 'as it is')}, {_ratio(alone, best['value'])} times as fast."
        )
    lines += [f"- {row['what']}: {row['value']:.4g} {row['unit']}" for row in rows if row["what"].startswith("ncu ")]
    hits = value(rows, "ncu lts__t_sector_hit_rate.pct")
    if hits is not None:
        lines.append(
            f"- So {'rows have to stay on chip' if hits < 30 else 'the cache holds the rows'}: the bar is 30 % hits."
        )
    return lines


def _linear(rows: list[Row]) -> list[str]:
    lines = []
    for what in ("tv from hidden states", "log-probs"):
        timed = [row for row in rows if row["what"] == what and row["value"]]
        if timed:
            best = min(timed, key=lambda row: row["value"])
            lines.append(
                f"- {what}: chunk {best['chunk']} is best, {best['value']:.4g} ms, {best['TFLOP/s']:.3g} TFLOP/s."
            )
    return lines


def _verify(rows: list[Row]) -> list[str]:
    timed = [row for row in rows if row["value"] and row.get("unit") == "ms" and "batch" in row]
    return [
        *(
            f"- B = {row['batch']}, {row['what']}: {row['value']:.4g} ms, {row['moves'] / 1e9:.3g} GB, "
            f"{row.get('GB/s', 0):.4g} GB/s"
            for row in timed
            if "entries" not in row
        ),
        "",
        "| model | B | entries | pages, ms | of a copy | slots, ms | slots / pages | differ by |",
        "|---|---|---|---|---|---|---|---|",
        *(_attention(row, rows) for row in timed if row["what"] == "attention over pages"),
    ]


def _attention(row: Row, rows: list[Row]) -> str:
    """Return the table line of attention over pages, beside attention over slots."""
    about = {name: row[name] for name in ("model", "batch", "entries", "uneven")}
    slots = value(rows, "attention over slots", **about)
    entries = f"{'up to ' if row['uneven'] else ''}{row['entries']}"
    return (
        f"| {row['model']} | {row['batch']} | {entries} | {row['value']:.4g} | {_percent(row['of_copy'])} | "
        f"{'' if slots is None else f'{slots:.4g}'} | {_ratio(slots, row['value'])} | "
        f"{value(rows, 'attention differs by', **about):.2g} |"
    )


def _percent(found: float | None) -> str:
    return "" if found is None else f"{100 * found:.0f} %"


def _engine(rows: list[Row]) -> list[str]:
    lines = [
        "| model | B | system | K | graph | ms a cycle | of plain | of eager | kernels | calls | device busy | waits |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["value"] and row["what"] == "cycle":
            graph = ("overlapped" if row["overlap"] else "yes") if row["graphs"] else "no"
            busy = "" if row["busy"] is None else f"{100 * row['busy']:.0f} %"
            lines.append(
                f"| {row['model']} | {row['batch']} | {row['system']} | {row['K']} | {graph} | "
                f"{row['value']:.4g} | {_share(row['of_plain'])} | {_share(row['of_eager'])} | "
                f"{row['launches']:.0f} | {row['calls']:.0f} | {busy} | {row['waits']:.0f} |"
            )
    return [
        *lines,
        "",
        "Where the device is busy for less than half of a cycle without graphs, these bring more than faster kernels; "
        "where it still is with them, what the host does between two cycles is next.",
        *_graphs_gain(rows),
        *_pages_gain(rows),
    ]


def _graphs_gain(rows: list[Row]) -> list[str]:
    """Return, by model, how many times faster graphs make a plain cycle of one row: ten times is the goal."""
    found = [row for row in rows if row["what"] == "cycle" and row["batch"] == 1 and row.get("of_eager")]
    alone = [row for row in found if row["graphs"] and row["K"] == 0]
    return [
        f"- {row['model']}, B = 1: {1 / row['of_eager']:.1f} times as fast with graphs"
        f"{' and overlap' if row['overlap'] else ''}."
        for row in alone
    ]


def _pages_gain(rows: list[Row]) -> list[str]:
    """Return, by model, the time of a cycle in pages relative to one in slots."""
    found = {(row["model"], row["paged"]): row for row in rows if row["what"] == "cache" and row["value"]}
    return [
        f"- {model}, B = {row['batch']}: with keys and values in pages a cycle takes "
        f"{row['value'] / found[model, False]['value']:.2f} of the time."
        for (model, paged), row in found.items()
        if paged and (model, False) in found
    ]


def _share(found: float | None) -> str:
    return "" if found is None else f"{found:.2f}"


def _adapter(row: Row) -> str:
    return f", LoRA of rank {row['lora']}" if row.get("lora") else ""


def _trainer(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        if "s" in row:
            share = 100 * row["log-probs s"] / row["s"]
            predicted = f" ({row['predicted GB']:.3g} predicted)"
            peak = "" if row["peak GB"] is None else f", {row['peak GB']:.3g} GB at the highest{predicted}"
            again = ", checkpointing" if row["checkpointing"] else ""
            lines.append(
                f"- {row['model']}, {row['tokens']} tokens{again}{_adapter(row)}: {row['s']:.3g} s, "
                f"log-probs {share:.0f} % of it{peak}, {row['tokens/s']:.4g} tokens/s"
            )
        elif row["what"] == "publish" and row["value"] is not None:
            by = {
                "shared": "shared memory",
                "store": "the object store's copies",
                "broadcast": "a broadcast over loopback",
            }[row["way"]]
            lines.append(
                f"- {row['model']}, publishing {row['GB']:.3g} GB by {by}: {row['value']:.3g} s, decoding stops for "
                f"{row['pause']:.3g} s"
            )
        elif row["what"] == "arrived" and not row["value"]:
            lines.append(f"- {row['model']}: **published weights are not the trainer's**")
    return lines


def _precision(rows: list[Row]) -> list[str]:
    lines = ["| layers | width | type | mean | 99 % | rms ratio | sampler | bounds exceeded |", "|---|" + "---|" * 7]
    for row in rows:
        if row.get("value") is not None:
            numbers = [f"{row[name]:.3g}" for name in ("value", "99 %", "rms ratio", "sampler")]
            lines.append(
                f"| {row['layers']} | {row['width']} | {row['dtype']} | {' | '.join(numbers)} | {row['beyond']} |"
            )
    return lines


def _job(rows: list[Row]) -> list[str]:
    return [
        f"- {row['model']}, {row['arm']}: {row['value']:.3g} s a step, {row['time/rollout']:.3g} of them rollouts, "
        f"accept length {row['accept length']:.2f}, reward {row['reward first']:.2f} to {row['reward last']:.2f}"
        for row in rows
        if row["value"]
    ]


SAID = {
    "card": _card, "tests": _tests, "tv": _tv, "linear": _linear, "verify": _verify, "engine": _engine,
    "trainer": _trainer, "job": _job, "precision": _precision, "headline": headline_page,
}  # fmt: skip
