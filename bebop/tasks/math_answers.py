r"""Comparison of short answers by math-verify: in tags, in a box, or in a column of a file.

math-verify reads a bare text as LaTeX, in which every letter is a variable: ``cat`` is a * c * t, equal to ``act``,
and ``1 000`` is 1 * 000. It does not recognise there what it reads in running text, such as ``11 USD`` or ``**11**``.
So three kinds of short answers are distinguished first:

- words are compared as texts, ignoring case, markup and blanks;
- a formula is read as LaTeX;
- a formula among words (``It is 11``), or text that LaTeX cannot read (``€11``), is read as running text.
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

LATEX_FUNCTIONS = "arcsin arccos arctan sinh cosh tanh sin cos tan cot sec csc log ln exp".split()
# Words that belong to formulas. LaTeX names are often written without their backslash, and then read as letters.
GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau phi chi psi omega"
NAMES = frozenset(
    "and or root frac max min gcd lcm mod det lim sup inf infty infinity oo percent percentage pct deg degree degrees "
    f"upsilon {GREEK}".split()
)
FUNCTION = re.compile("|".join([*LATEX_FUNCTIONS, "asin", "acos", "atan", "sqrt", "cbrt"]))
BARE_NAME = re.compile(rf"(?<![\\a-zA-Z])(?:{'|'.join([*LATEX_FUNCTIONS, *GREEK.split()])})(?![a-zA-Z])")
VARIABLES = re.compile(r"[abc]+|[mn]+|[pqr]+|[u-z]+")  # letters that stand side by side in a product
TEXT_COMMAND = re.compile(r"\\(?:text\w*|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
COMMAND = re.compile(r"\\[a-zA-Z]+")
LETTERS = re.compile(r"[^\W\d_]{2,}")
CURRENCY = re.compile(r"(?<=\d)[A-Z]{3}$")  # 11USD
LATEX_SPAN = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
EDGES = ".,;:!?()[]{}\"'*_`$=<>"
# Variants of signs and their replacements: quotation marks, minus signs, narrow blanks. RAISED: superscript digits.
SIGNS = str.maketrans("\u2018\u2019\u201c\u201d\u2012\u2013\u2212\u2044\u00a0\u2009\u202f", "''\"\"---/   ")
RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070\u2074-\u2079\u207b]+")
MINUS = "\u2212"  # as a raised minus is normalised
PAIRS = [("**", "**"), ("__", "__"), ("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), *((one, one) for one in "*_`$\"'")]

# 1e-05 is no 1 * e - 05; 2e-5 may be 2 * e - 5, unless the gold answer is a number of JSON.
EXPONENT = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?![\w.]*\w)")
CLEAR_EXPONENT = re.compile(r"(?<![\w.\\])(1|\d+\.\d+|\d+(?=[eE][+-]?\d\d))[eE]([+-]?\d{1,3})(?![\w.]*\w)")
SPACE_COMMAND = re.compile(r"(?<=\d)\\[,;:! ](?=\d)")
THOUSANDS = re.compile(r"(?<![\w.,^])([1-9]\d{0,2})((?:[ '_]\d{3})+)(?!\d)")
MIXED = re.compile(r"(?<![\w.,/^}])(\d+) (\d+)/(\d+)(?![\w/^])")
APART = re.compile(r"(?<=\d) +(?=\d)")

FLOAT_DIGITS = 6  # digits after the point that math-verify compares
SIGNIFICANT = 3  # compared digits of a number so small that those digits would be zeros


def gold_text(answer: str | int | float | Decimal) -> str:
    """Return a gold answer as text, from the ``####`` after its working, as in GSM8K."""
    return str(answer).rsplit("####", 1)[-1].strip()


def prepare(*_args: object) -> None:
    """Import what ``score_math`` needs, which takes some seconds where nothing is compiled."""
    import math_verify  # noqa: F401

    from bebop.tasks.guarded import guard_math_verify

    guard_math_verify()


def score_math(candidate: str, gold: str, short: bool = False, number: bool = False) -> float:
    """Return 1.0 if math-verify finds both equal, else 0.0. Its timeouts are off: they need the main thread.

    Args:
        candidate: the completion, or the answer in it.
        gold: the right answer.
        short: whether ``candidate`` is an answer by itself, not a text that ends with one.
        number: the gold answer is a JSON number, so ``2e-5`` is a number too.
    """
    import math_verify

    from bebop.tasks.guarded import guard_math_verify

    guard_math_verify()
    if "\\boxed" in candidate:
        candidate, short = boxed(candidate[candidate.rfind("\\boxed") :]), True
    gold = tidy(boxed(gold), number)
    expected = _latex(gold) if re.search(r"\d", gold) or not words(gold) else []  # hot day is not hot
    if not expected and words(gold):
        spans = [next(filter(None, groups)) for groups in LATEX_SPAN.findall(candidate)]
        return float(plain(gold) in (plain(candidate), *([plain(spans[-1])] if spans and not short else [])))
    expected = expected or _running(gold)
    answer = tidy(candidate, number) if short else _numbers(candidate, number)
    found = (_latex(answer) if short else []) or _running(answer)
    digits = max([FLOAT_DIGITS, *(SIGNIFICANT - 1 - place for place in _places([*expected, *found]))])
    return float(math_verify.verify(expected, found, float_rounding=digits, timeout_seconds=None))


def boxed(text: str) -> str:
    r"""Return the contents of the last ``\boxed`` of a text; the text itself if there is none."""
    from latex2sympy2_extended.math_normalization import extract_boxed_content

    return extract_boxed_content(text, mode="last") if "\\boxed" in text else text


def tidy(text: str, number: bool = False) -> str:
    """Strip a short answer of surrounding markup, and write each of its numbers without separators."""
    text = SPACE_COMMAND.sub(" ", text.translate(SIGNS)).replace("\\%", "%").replace("\\$", "$").replace("{,}", ",")
    text = RAISED.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0]).replace(MINUS, '-')}}}", text)
    before = None
    while text != before:
        before, text = text, text.strip().rstrip(".,;:").strip()
        for left, right in PAIRS:
            inner = text[len(left) : -len(right)]
            if text == left + inner + right and inner and left not in inner:
                text = inner
    text = MIXED.sub(r"\1\\frac{\2}{\3}", THOUSANDS.sub(_joined, _numbers(text, number)))
    return text if "\\" in text else APART.sub(", ", text)


def _joined(found: re.Match[str]) -> str:
    return re.sub(r"\D", "", found[0])


def _numbers(text: str, number: bool) -> str:
    """Expand numbers with an exponent in a text, such as 2e-5."""
    pattern = EXPONENT if number else CLEAR_EXPONENT
    return pattern.sub(lambda found: format(Decimal(f"{found[1]}e{found[2]}"), "f"), text)


def plain(text: str) -> str:
    """Return words in their normal form for comparison."""
    return " ".join(tidy(_unwrapped(text)).replace("\\", " ").split()).casefold()


def _unwrapped(text: str) -> str:
    return unicodedata.normalize("NFC", TEXT_COMMAND.sub(r" \1 ", text))


def words(text: str) -> bool:
    r"""Return whether letters of a text form words, as in ``cat`` and ``11 USD``.

    Letters in ``2xy``, ``sin x`` and ``\pi`` form no words.
    """
    for token in COMMAND.sub(" ", _unwrapped(text)).split():
        token = token.strip(EDGES)
        alone = re.fullmatch(r"[^\W\d_]+(?:['.&-][^\W\d_]+)*", token) is not None
        for run in LETTERS.findall(token):
            low = run.casefold()
            rest = FUNCTION.sub(" ", low)
            formula = rest != low and all(len(part) == 1 or VARIABLES.fullmatch(part) for part in rest.split())
            if low in NAMES or VARIABLES.fullmatch(low) or formula:
                continue
            if alone or len(run) > 3 or CURRENCY.search(token):
                return True
    return re.fullmatch(r"\w*[^\W\d_]\d\w*", text) is not None and "_" not in text  # H2O, B12


def _latex(text: str) -> list[Any]:
    """Return math-verify's reading of a short answer as a formula, with its text; empty if words remain."""
    import math_verify

    formula = text if words(text) else BARE_NAME.sub(r"\\\g<0> ", text)
    marked = f"${formula[:-1]}$%" if text.endswith("%") else formula if "$" in text else f"\\boxed{{{formula}}}"
    found: list[Any] = math_verify.parse(marked, parsing_timeout=None)
    return found if len(found) > 1 and not words(str(found[-1])) else []  # it leaves units out that it knows


def _running(text: str) -> list[Any]:
    """Return math-verify's last expression in running text."""
    import math_verify

    found: list[Any] = math_verify.parse(_unwrapped(text), parsing_timeout=None)
    return found


def _places(values: Sequence[Any]) -> list[int]:
    """Return the position of the first non-zero digit of each non-zero number: 0 for 5, -5 for 0.00001."""
    numbers = [abs(value) for value in values if getattr(value, "is_Number", False) and value.is_finite]
    return [math.floor(math.log10(number)) for number in numbers if number]
