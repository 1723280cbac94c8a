"""Rules of README.md. Numbers are named "head, what"; "A - B": over the same seeds; "..., seeds": for the noise floor.

Every number is over seeds and prompts (``recipes.reproduce.real.effects``). The fact ``size of NAME`` is the number in
units of the difference of two seeds of one arm. ``curves of HEAD``: how many of its validation curves are flat. "at
step 100", "at second 30": heads at the marks of training; "fresh": from the fitted start instead of the shared head.
"""

from recipes.reproduce.verdicts import Kind, Need, Part, Rule

DRAFTS = 1.2  # accept length, tokens, above which a head counts as drafting; one that drafts nothing has 1
CONVERGED = 0.99  # share of seeds whose validation curve is flat
BASES = ("hard_ce", "ce")
MARKS = {"steps": ("step 100", "step 200"), "processor time": ("second 30", "second 60")}
CUT = ("top_4", "top_4_renormalised", "top_64", "top_64_renormalised")
WHERE = {
    "temperatures": "over temperatures",
    "prompts": "from prompt to prompt of one kind at temperature 1",
    "tokens": "from token to token at temperature 1",
}
NOISE = "by more than the noise of the arms"
FLAT = "tested if the accept length is above 1.2 and all validation curves are flat"


def drafting(head: str, when: str = "") -> Need:
    """Return the condition of claims about acceptance: the head drafts at all."""
    otherwise = f"the heads of {head}{when} hardly draft"
    return Need(number=f"{head}, accept length{when}", kind="above", bound=DRAFTS, otherwise=otherwise)


def converged(*heads: str) -> tuple[Need, ...]:
    """Return the conditions of claims about a loss's result: its heads draft, and their curves are flat."""
    flat = (
        Need(number=f"{h}, flat", kind="above", bound=CONVERGED, otherwise=f"not all validation curves of {h} are flat")
        for h in heads
    )
    return (*(drafting(head) for head in heads), *flat)


def gain(head: str, base: str, when: str = "", kind: Kind = "above") -> Part:
    """Return the part of a rule about the accept length of one head minus that of another."""
    arms = tuple(f"{arm}, accept length{when}, seeds" for arm in (head, base))
    return Part(number=f"{head} - {base}, accept length{when}", kind=kind, arms=arms)


def over(base: str, statement: str, more: str = "") -> Rule:
    """Return the rule on the gain over another loss where both have converged."""
    part = gain("e2e_tv", base)
    return Rule(
        claim="C3",
        statement=f"On SmolLM2, {statement}.",
        text=f"confirmed if the gain in accept length lies above 0 {NOISE}, refuted if below by as much; {FLAT}",
        evidence=f"Gain {{{part.number}}} tokens, {{size of {part.number}}}: {{e2e_tv, accept length}} against "
        f"{{{base}, accept length}}{more}; {{curves of e2e_tv}}, {{curves of {base}}}.",
        any_of=((part,),),
        needs=converged("e2e_tv", base),
    )


def unseen(base: str) -> Rule:
    """Return the rule on the gain for kinds of prompts that no head was trained on."""
    part = gain("e2e_tv", base, " on unseen kinds")
    return Rule(
        claim="C3",
        statement=f"On SmolLM2, the gain over {base} carries over to kinds of prompts that no head was trained on.",
        text=f"confirmed if the gain in accept length there lies above 0 {NOISE}, refuted if below by as much; {FLAT}",
        evidence=f"Gain {{{part.number}}} tokens, {{size of {part.number}}}; on kinds that were trained on "
        f"{{e2e_tv - {base}, accept length}}.",
        any_of=((part,),),
        needs=converged("e2e_tv", base),
    )


def early(base: str, equal: str) -> Rule:
    """Return the rule on the gain after little training, from the shared head."""
    parts = tuple(gain("e2e_tv", base, f" at {mark}") for mark in MARKS[equal])
    told = "; ".join(f"{mark}: {{{part.number}}}" for mark, part in zip(MARKS[equal], parts, strict=True))
    return Rule(
        claim="C3",
        statement=f"On SmolLM2, end-to-end TV beats {base} after little training as well, at equal {equal}, from the "
        "shared head.",
        text=f"confirmed if the gain in accept length lies above 0 at both marks {NOISE}, refuted if below by as much "
        "at one (corrected for two); tested if the accept length is above 1.2 at the last",
        evidence=f"Gain in tokens, {told}; {{size of {parts[-1].number}}} at the last.",
        any_of=(parts,),
        needs=tuple(drafting(head, f" at {MARKS[equal][-1]}") for head in ("e2e_tv", base)),
    )


def fresh(base: str, equal: str) -> Rule:
    """Return the rule on training from the fitted start; the paper itself continues from a trained head."""
    mark = MARKS[equal][-1]
    part = gain("fresh e2e_tv", f"fresh {base}", f" at {mark}", kind="below")
    return Rule(
        claim="beyond",
        statement=f"On SmolLM2, a head trained from its beginning learns more slowly by end-to-end TV than by {base}, "
        f"at equal {equal}.",
        text=f"confirmed if the difference of accept lengths at {mark} lies below 0 {NOISE}, refuted if above by as "
        f"much; tested if the heads of {base} reach 1.2",
        evidence=f"Difference {{{part.number}}} tokens, {{size of {part.number}}}.",
        any_of=((part,),),
        needs=(drafting(f"fresh {base}", f" at {mark}"),),
    )


def flatter(base: str, way: str) -> Rule:
    """Return the rule on slope removal: acceptance of sampled drafts falls less with entropy."""
    number = f"e2e_tv - {base}, slope over {way}"
    arms = tuple(f"{head}, slope over {way}, seeds" for head in ("e2e_tv", base))
    falls = Need(number=f"{base}, slope over {way}", kind="below", otherwise=f"acceptance of {base} does not fall")
    return Rule(
        claim="C3",
        statement=f"On SmolLM2, acceptance of sampled drafts falls less with entropy for end-to-end TV than for "
        f"{base}, {WHERE[way]}.",
        text=f"confirmed if the difference of slopes lies above 0 {NOISE}, refuted if below by as much; "
        f"{FLAT}, and if that of {base} falls at all",
        evidence=f"Slope {{e2e_tv, slope over {way}}} per nat against {{{base}, slope over {way}}}: difference "
        f"{{{number}}}, {{size of {number}}}.",
        any_of=((Part(number=number, arms=arms),),),
        needs=(*converged("e2e_tv", base), falls),
    )


def mostly(way: str) -> Rule:
    """Return the rule that more than half of the slope is removed; the paper: from -1.68 tokens per nat to -.06."""
    number = f"e2e_tv - half of ce, slope over {way}"
    arms = tuple(f"{head}, slope over {way}, seeds" for head in ("e2e_tv", "ce"))
    falls = Need(number=f"ce, slope over {way}", kind="below", otherwise="acceptance of ce does not fall")
    return Rule(
        claim="C3",
        statement=f"On SmolLM2, end-to-end TV removes more than half of the dependence on entropy, {WHERE[way]}.",
        text=f"confirmed if its slope minus half of that of ce lies above 0 {NOISE}, refuted if below by as much; "
        f"{FLAT}, and if that of ce falls at all",
        evidence=f"Slope {{e2e_tv, slope over {way}}} per nat against {{ce, slope over {way}}}: {{{number}}} above "
        "half of it.",
        any_of=((Part(number=number, arms=arms),),),
        needs=(*converged("e2e_tv", "ce"), falls),
    )


def steadier(base: str) -> Rule:
    """Return the rule on the overlap lost from the first draft of a chain to the last."""
    number = f"e2e_tv - {base}, overlap lost along a chain"
    arms = tuple(f"{head}, overlap lost along a chain, seeds" for head in ("e2e_tv", base))
    return Rule(
        claim="C3",
        statement=f"On SmolLM2, end-to-end TV loses less overlap from the first draft of a chain to the fifth than "
        f"{base}.",
        text=f"confirmed if the difference lies below 0 {NOISE}, refuted if above by as much; {FLAT}",
        evidence=f"Lost {{e2e_tv, overlap lost along a chain}} against {{{base}, overlap lost along a chain}}: "
        f"{{{number}}}, {{size of {number}}}.",
        any_of=((Part(number=number, kind="below", arms=arms),),),
        needs=converged("e2e_tv", base),
    )


def whole(size: int) -> Rule:
    """Return the rule of Fig 14b, the table of losses on the K largest draft logits."""
    mark = MARKS["steps"][-1]
    parts = tuple(gain("tv", cut, f" at {mark}") for cut in CUT if cut.split("_")[1] == str(size))
    told = "; ".join(f"{{{part.number}}}" for part in parts)
    return Rule(
        claim="Fig 14b",
        statement=f"On SmolLM2, from the shared head, TV on the whole vocabulary beats TV on the {size} largest draft "
        "logits, at equal steps.",
        text=f"confirmed if the gain in accept length at {mark} lies above 0 over both readings {NOISE}, refuted if "
        "below by as much over one (corrected for two); tested if the accept length of the former is above 1.2",
        evidence=f"Gain in tokens with both distributions over all tokens, and over the {size} alone: {told}.",
        any_of=(parts,),
        needs=(drafting("tv", f" at {mark}"),),
    )


GREEDY = "e2e_tv - ce, half of sampled - greedy"


def greedy_gains() -> Rule:
    """Return the rule that greedy drafts gain nothing; the paper: less than 0.3 %."""
    arms = tuple(f"{head}, accept length greedy, seeds" for head in ("e2e_tv", "ce"))
    gains = Need(number="e2e_tv - ce, accept length", kind="above", otherwise="sampled drafts gain nothing themselves")
    return Rule(
        claim="C3",
        statement="On SmolLM2, greedy drafts gain nothing by it (the paper: less than 0.3 %).",
        text="confirmed if half of what sampled drafts gain over ce minus what greedy ones gain lies above 0 "
        f"{NOISE}, refuted if below by as much; {FLAT}, and if sampled drafts gain",
        evidence="Greedy drafts change by {e2e_tv - ce, accept length greedy} tokens, sampled ones by "
        "{e2e_tv - ce, accept length}.",
        any_of=((Part(number=GREEDY, arms=arms),),),
        needs=(*converged("e2e_tv", "ce"), gains),
    )


RULES = (
    over("hard_ce", "heads of end-to-end TV are accepted for longer than those of hard-label cross-entropy"),
    over("ce", "they are so than those of soft cross-entropy, the honest baseline"),
    over("tv", "they are so than those of TV of single steps"),
    greedy_gains(),
    *(unseen(base) for base in BASES),
    *(early(base, equal) for base in BASES for equal in MARKS),
    *(flatter(base, way) for base in BASES for way in WHERE),
    *(mostly(way) for way in WHERE),
    *(steadier(base) for base in BASES),
    *(fresh(base, equal) for base in BASES for equal in MARKS),
    *(whole(size) for size in (4, 64)),
)
