"""The page of a certificate: verdict, evidence over tokens, the faults that the run would have shown, and positions."""

import math
from collections.abc import Sequence
from pathlib import Path

from bebop.certify.certificate import Certificate, SettingResult, share
from bebop.certify.evidence import Evidence
from bebop.command import writing
from bebop.report.document import Card, document, table
from bebop.report.figures import INK, Key, Panel, Trace, color, layout, line_trace, rounded, visible

FILE = "report.html"
SHOWN = 12  # directions in a table
BARS = 8  # directions in a plot
FLOOR = -12.0  # least ln E in a plot


def write_page(folder: Path, certificate: Certificate) -> Path:
    """Write ``report.html`` and return its path."""
    path = folder / FILE
    with writing(path):
        path.write_text(render(certificate), encoding="utf-8")
    return path


def render(certificate: Certificate) -> str:
    """Return the whole page as HTML."""
    cards = [_verdict(certificate), _evidence(certificate)]
    failed = certificate.verdict == "fail"
    cards += [_directions(one, failed) for one in certificate.settings if one.evidence]
    if certificate.white_box:
        cards.append(_white_box(certificate))
    cards += [_smallest(one) for one in certificate.settings if one.visible]
    cards += [_places(one) for one in certificate.settings if one.places and failed]
    cards += [_engine(certificate), _gaps(certificate)]
    name = str(certificate.engine.get("model", certificate.engine.get("name", "engine")))
    return document("Bebop · certificate of exactness", f"{name}: {certificate.verdict}", cards)


def _verdict(certificate: Certificate) -> Card:
    notes = [certificate.advice, *(f"Warning: {line}." for line in certificate.warnings)]
    if len(certificate.ranked) > 1:
        (first, best), (second, next_best) = certificate.ranked[:2]
        notes.append(f"Likeliest cause: {first}. Next is {second}, less likely by e^{best - next_best:.1f}.")
    notes += [f"Broken rule: {line}." for line in certificate.structure[:SHOWN]]
    return Card(title=certificate.verdict.capitalize(), text=certificate.sentence, notes=notes, wide=True)


def _evidence(certificate: Certificate) -> Card:
    """Show ln E over tokens, a line for each setting, and the line at which a fault is proved."""
    limit, traces, keys = math.log(1 / certificate.alpha), list[Trace](), list[Key]()
    for number, one in enumerate(certificate.settings):
        x, y = [0.0, *(float(n) for n, _ in one.history)], [0.0, *(max(e, FLOOR) for _, e in one.history)]
        traces.append(line_trace(x, y, one.name, color(number), one.name))
        keys.append(Key(label=one.name, color=color(number), group=one.name))
    end = max((float(one.tokens) for one in certificate.settings), default=1.0)
    rule = line_trace([0.0, end], [limit, limit], f"1 / alpha = {1 / certificate.alpha:,.0f}", INK)
    traces.append(rule | {"line": {"color": INK, "width": 1.5, "dash": "dash"}, "mode": "lines"})
    keys.append(Key(label=f"proof of a fault: E = {1 / certificate.alpha:,.0f}", color=INK, style="dashed"))
    text = (
        "E is what a gambler has made of 1 by betting on faults at odds that are fair if the engine is right. He may "
        f"look as often as he likes: the chance that E ever exceeds {1 / certificate.alpha:,.0f} is then at most "
        f"{certificate.alpha:g} (Ville's inequality). A line that falls is stakes lost on faults that are not there. "
        f"All settings and tests together: ln E = {certificate.log_e:.1f}."
    )
    panel = Panel(caption="ln E over tokens", traces=traces, layout=layout("completion tokens"))
    return Card(title="Evidence against the claim", text=text, panels=[panel], keys=keys, wide=True)


def _directions(one: SettingResult, failed: bool) -> Card:
    """Show the directions that prove a fault, or without one those that could still hide the largest fault."""
    found = _strongest(one.evidence) if failed else sorted(one.evidence, key=lambda e: -(e.tv or 0.0))[:SHOWN]
    rows = [_row(direction) for direction in found]
    which = "with the most evidence" if failed else "in which the most could still be hidden"
    text = (
        f"{one.name}: {one.tokens:,} tokens of {one.answers:,} completions. A direction is a way in which tokens might "
        "be drawn instead of as claimed; the bounds are of the share of tokens drawn so, and of the total variation "
        f"that this share makes per token. @ is the place in the decoding cycle. Shown are {len(rows)} of "
        f"{len(one.evidence)}, those {which}."
    )
    heads = ("Direction", "Kind", "ln E", "Share at most", "Total variation at most")
    return Card(title=f"Directions, {one.name}", text=text, table=table(heads, rows), wide=True)


def _strongest(evidence: Sequence[Evidence]) -> list[Evidence]:
    return sorted(evidence, key=lambda found: -found.log_e)[:SHOWN]


def _row(found: Evidence) -> tuple[str, ...]:
    bounds = ["-" if bound is None else share(bound) for bound in (found.share, found.tv)]
    return (found.name.replace("_", " "), found.group.replace("_", " "), f"{found.log_e:.1f}", *bounds)


def _white_box(certificate: Certificate) -> Card:
    rows = [_row(found)[:3] for found in _strongest(certificate.white_box)]
    text = (
        "Inside verification, where all distributions are known: drafts against the distribution recorded for them, "
        "acceptance against min(1, p/q), the recovered token against the residual, the bonus token against its row."
    )
    return Card(title="Draws inside verification", text=text, table=table(("Test", "Draw", "ln E"), rows), wide=True)


def _smallest(one: SettingResult) -> Card:
    """Show the smallest faults that this run shows, as bars of total variation, for the directions with the largest."""
    seen = sorted(one.visible, key=lambda found: found.tv)[-BARS:]
    trace: Trace = {
        "type": "bar", "orientation": "h", "y": [found.name.replace("_", " ") for found in seen],
        "x": [rounded(100 * found.tv) for found in seen], "marker": {"color": color(0)},
        "customdata": [rounded(100 * found.share) for found in seen],
        "hovertemplate": "%{x:.2g} % of the probability, in a share of %{customdata:.2g} % of tokens<extra></extra>",
    }  # fmt: skip
    frame = layout("total variation per token, %", zero=True) | {"hovermode": "closest"}
    frame["yaxis"] |= {"nticks": len(seen)}
    text = (
        f"{one.name}: the smallest fault that {one.tokens:,} tokens show nine times in ten, as total variation per "
        f"token. Shown are the {len(seen)} of {len(one.visible)} directions in which most was needed; smaller faults "
        "would as a rule have passed unseen."
    )
    panel = Panel(caption="smaller is better", traces=[trace], layout=frame)
    return Card(title=f"What would have been seen, {one.name}", text=text, panels=[panel], wide=True)


def _places(one: SettingResult) -> Card:
    rows = [
        (f"request {place.request}, token {place.position + 1}", visible(place.context), visible(place.token),
         f"{place.gain:+.2f}")
        for place in one.places
    ]  # fmt: skip
    text = "Where the winning direction gained most: the token that was drawn, after the end of what stood before it."
    heads = ("Where", "Context", "Token", "Gain in ln E")
    return Card(title=f"Worst positions, {one.name}", text=text, table=table(heads, rows), wide=True)


def _engine(certificate: Certificate) -> Card:
    groups = {"engine": certificate.engine, "reference": certificate.reference, "log-probs": certificate.logprobs,
              "seeds": certificate.seeds, "made with": certificate.made}  # fmt: skip
    rows = [(f"{group}: {name}", str(value)) for group, of in groups.items() for name, value in of.items()]
    for one in certificate.settings:
        rows.append((f"sampling, {one.name}", ", ".join(f"{name} {value}" for name, value in one.sampling.items())))
        if one.acceptance is not None:
            rows.append((f"drafts accepted, {one.name}", share(one.acceptance)))
    return Card(title="What was certified", text="", table=table(("", "Value"), rows), wide=True)


def _gaps(certificate: Certificate) -> Card:
    text = " ".join(certificate.scope)
    if not certificate.not_tested:
        text += " Everything was tested that there is a test for."
    return Card(title="Not tested", text=text, notes=certificate.not_tested, wide=True)
