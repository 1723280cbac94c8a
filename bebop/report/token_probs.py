"""The card of both distributions, token by token, at the contexts of the probe set where their overlap changed most."""

from collections.abc import Sequence

from bebop.monitor.probe_set import TokenProbs
from bebop.report.document import Card
from bebop.report.figures import Key, Panel, Trace, layout

SHOWN = 6  # contexts, of all runs together
BARS = 6  # tokens of one context
READ = 22  # characters of the context in the caption
ROOM = 10  # characters of a token's label
DISTRIBUTIONS = (
    ("policy, first", "#b9c1cb", 0, "target"),
    ("head, first", "#a9c8ea", 0, "draft"),
    ("policy, last", "#1f2933", 1, "target"),
    ("head, last", "#2563a8", 1, "draft"),
)
TEXT = (
    "What the policy (p) and its head (q) think of the next token, at the first and the last reading of the fixed "
    "texts, where their overlap changed most. A draft is accepted with the overlap of both distributions. Where both "
    "have moved together, the head has kept up with the policy; where only p has moved, it has not."
)


def cards(runs: Sequence[tuple[str, Sequence[tuple[TokenProbs, TokenProbs]]]]) -> list[Card]:
    """A panel a context; ``runs``: names with their contexts, each at the first and the last reading."""
    pairs = [(name, *pair) for name, contexts in runs for pair in contexts]
    pairs.sort(key=lambda pair: abs(pair[2].overlap - pair[1].overlap))
    apart = {(name, last.context): (name, first, last) for name, first, last in pairs}  # many answers begin alike
    pairs = sorted(apart.values(), key=lambda pair: -abs(pair[2].overlap - pair[1].overlap))
    many = len({name for name, *_ in pairs}) > 1
    panels = [_panel(first, last, f"{name}: " if many else "") for name, first, last in pairs[:SHOWN]]
    keys = [Key(label=label, color=shade, style="block", group=f"probs {label}") for label, shade, *_ in DISTRIBUTIONS]
    title = "Where the distributions moved"
    return [Card(title=title, text=TEXT, panels=panels, keys=keys, wide=True)] if panels else []


def _panel(first: TokenProbs, last: TokenProbs, prefix: str) -> Panel:
    both, weight, text = (first, last), dict[int, float](), dict[int, str]()
    for reading in both:
        for token, name, p, q in zip(reading.ids, reading.tokens, reading.target, reading.draft, strict=True):
            weight[token] = max(weight.get(token, 0.0), p, q)
            text[token] = _short(visible(name))
    tokens = sorted(weight, key=lambda token: -weight[token])[:BARS]
    names = [text[token] for token in tokens]
    names = [f"{name} #{token}" if names.count(name) > 1 else name for name, token in zip(names, tokens, strict=True)]
    traces: list[Trace] = []
    for label, shade, when, distribution in DISTRIBUTIONS:
        known = dict(zip(both[when].ids, getattr(both[when], distribution), strict=True))
        traces.append(
            {
                "type": "bar", "x": names, "y": [known.get(token, 0.0) for token in tokens], "name": label,
                "marker": {"color": shade, "line": {"width": 0}}, "legendgroup": f"probs {label}",
                "hovertemplate": "%{y:.3f}",
            }
        )  # fmt: skip
    context = visible(last.context)
    context = context if len(context) <= READ else "…" + context[-READ:]
    frame = layout("next token") | {"barmode": "group", "bargap": 0.25}
    frame["xaxis"] |= {"type": "category"}
    frame["yaxis"] |= {"range": [0, 1]}
    caption = f"{prefix}after “{context}”: overlap {first.overlap:.2f} → {last.overlap:.2f}"
    return Panel(caption=caption, traces=traces, layout=frame)


def _short(name: str) -> str:
    """As much of a token as has room below its bars: longer labels would be turned, or lie over one another."""
    return name if len(name) <= ROOM else f"{name[: ROOM - 1]}…"


def visible(text: str) -> str:
    """White space that one can see."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    return shown if shown.strip() else shown.replace(" ", "␣") or "(nothing)"
