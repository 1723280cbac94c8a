"""HTML report on run folders: a summary table and figures, each with an explanation."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from bebop.command import shown_command, writing
from bebop.errors import UserError
from bebop.report import epochs, history, made
from bebop.report.charts import plots
from bebop.report.document import Card, document, opened, table
from bebop.report.drift import Replay, cards, replay_log, replay_runs
from bebop.report.figures import Figure, draw, run_keys
from bebop.report.runs import HEADS, NOTE, Run, load_runs, summary
from bebop.report.verdict import Said, said
from bebop.trajectory_db.reader import NAME
from bebop.view.folders import HOST, PORT

ADDRESS = f"http://{HOST}:{PORT}/"


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report on some run folders, by default as ``report.html`` in the first, and return its path."""
    runs = load_runs(folders)
    return _write(out or folders[0] / "report.html", lambda: render(runs, replay_runs(folders, runs), folders))


def conclude(folder: Path, out: Path | None = None) -> Said:
    """Return the verdict on a finished run; with ``out``, also write its page there from the same records."""
    runs = load_runs([folder])
    replays = replay_runs([folder], runs)
    if out is not None:
        _write(out, lambda: render(runs, replays, [folder]))
    return judge(runs, replays)[0]


def judge(runs: Sequence[Run], replays: Sequence[Replay]) -> list[Said]:
    """Return one verdict per run; ``replays``: replayed logs of the monitored runs."""
    watched = {replay.name: replay.explanations for replay in replays}
    return [said(run, watched.get(run.name, [])) for run in runs]


def write_log_report(logs: Sequence[Path], names: Mapping[str, str], out: Path | None = None) -> Path:
    """Write the drift cards of logs of any trainer and return the path; ``names`` as in ``logs.read_log``."""

    def page() -> str:
        replays = [replay_log(path, path.stem, names=names) for path in logs]
        title = replays[0].name if len(replays) == 1 else f"{len(replays)} logs"
        many = len(replays) > 1
        verdicts = [(replay.name if many else "", said(None, replay.explanations)) for replay in replays]
        return document("Bebop · drift of acceptance", title, cards(replays), _opening(verdicts))

    return _write(out or logs[0].with_suffix(".html"), page)


def _write(out: Path, page: Callable[[], str]) -> Path:
    """Check that ``out`` can be written, then render the page and write it."""
    if not out.parent.is_dir() or out.is_dir():
        raise UserError(f"--out {out} cannot be written: give a file in a folder that exists")
    text = page()
    with writing(out):
        out.write_text(text, encoding="utf-8")
    return out


def render(runs: Sequence[Run], replays: Sequence[Replay] = (), folders: Sequence[Path] = ()) -> str:
    """Return the page as HTML; ``replays``: replayed logs of monitored runs; ``folders``: the folders of the runs."""
    figures = [draw(plot, runs) for plot in plots(runs)]
    drawn = [_card(figure, len(runs)) for figure in figures if figure.panels]
    drawn += [*epochs.cards(runs, folders), *history.cards(runs, folders)] if folders else []
    drawn += cards(replays)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    names = [run.name if len(runs) > 1 else "" for run in runs]
    verdicts = list(zip(names, judge(runs, replays), strict=True))
    opening = _opening(verdicts, [run for run in runs if run.folder is not None and (run.folder / NAME).is_file()])
    return document(
        "Bebop · run report", title, [_summary(runs), *drawn, *_left_out(figures), *made.cards(runs)], opening
    )


def _opening(verdicts: Sequence[tuple[str, Said]], answered: Sequence[Run] = ()) -> str:
    """Return the verdicts at the top of the page, with the command that shows the stored completions."""
    note = ""
    if answered:
        command = escape(shown_command("view", *(run.place or "" for run in answered)))
        note = f"Completions token by token: <code>{command}</code>, then <a href='{ADDRESS}'>{ADDRESS}</a>."
    return opened([(name, one.verdict, one.shown) for name, one in verdicts], note)


def _summary(runs: Sequence[Run]) -> Card:
    """Return the table at the top; for several runs it shows their colours."""
    rows = [summary(run) for run in runs]
    keys = run_keys(runs) if len(runs) > 1 else []
    return Card(title="Summary", text=NOTE, table=table(HEADS, rows, keys), wide=True)


def _card(figure: Figure, runs: int) -> Card:
    """Return one figure as a card, with a note on the metrics that each run lacks."""
    where = " in {}" if runs > 1 else ""
    notes = [f"Not recorded{where.format(run)}: {', '.join(absent)}." for run, absent in figure.missing.items()]
    return Card(
        title=figure.plot.chart.title, text=figure.plot.chart.text, panels=figure.panels, keys=figure.keys, notes=notes
    )  # fmt: skip


def _left_out(figures: Sequence[Figure]) -> list[Card]:
    """Return a card that lists the figures without any data; empty if all have data."""
    absent = [f"{f.plot.chart.title} ({', '.join(f.plot.metrics)})" for f in figures if not f.panels]
    text = f"Nothing was recorded for: {'; '.join(absent)}."
    return [Card(title="Left out", text=text, wide=True)] if absent else []
