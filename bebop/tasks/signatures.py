"""Signatures of a user's reward function, and how each is called. All of this runs in the function's process.

- ``text``: ``f(text, item)``, for one completion and the row of the data with question, answer and metadata.
- ``trl``: ``f(prompts, completions, **columns) -> list``, for a batch, as TRL's ``GRPOTrainer`` calls it. Completions
  are texts, or lists of one message if the question is a list of messages; ``trl_messages``: always the latter.
- ``verl``: ``f(data_source, solution_str, ground_truth, extra_info)``, as verl's ``custom_reward_function``.

Each of them may be a coroutine function. The names of the parameters distinguish them.
"""

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from bebop.errors import UserError

if TYPE_CHECKING:  # the settings take longest to import, and every reward process imports this module
    from bebop.config.job import RewardSignature

CANCEL_SECONDS = 0.5  # time for a cancelled coroutine to end
# TRL's examples read completion[0]["content"], which fails on a text.
MESSAGES = "; if it reads messages, set task.reward_signature=trl_messages"
SHOWN = 80  # characters of a value in a message
TRL, IDS, VERL = "completions", "completion_ids", "solution_str"  # the parameters that distinguish the signatures
SIGNATURES = ("text", "trl", "trl_messages", "verl")  # values of the setting, except auto
BATCHES = ("trl", "trl_messages")
KNOWN = f"(text, item), TRL's with {TRL!r} and verl's with {VERL!r} are known"
# Arguments that TRL passes in addition to the columns of its data, and that Bebop lacks.
TRL_ONLY = (IDS, "trainer_state", "log_extra", "log_metric", "environments")

Value = float | dict[str, float | None] | None  # reward of a completion: a number, parts, or None: does not apply
# Outcome of one completion: a value; what is wrong with the value; an exception as one line and as a traceback;
# or a timeout.
Reply = (
    tuple[Literal["value"], Value] | tuple[Literal["wrong"], str] | tuple[Literal["raised"], str, str]
    | tuple[Literal["late"]]
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One completion to score.

    >>> Call(text="<answer>4</answer>", item={"question": "2 + 2 =", "answer": "4"}, task="sums")  # doctest: +SKIP
    """

    text: str  # of the completion
    item: dict[str, Any]  # question, answer and metadata, which is the whole row of a file
    task: str = ""  # name of the data set
    token_ids: tuple[int, ...] | None = None  # [T] of the completion; None: only its text is known


class Function:
    """User's function with one of the signatures."""

    def __init__(self, function: Callable[..., Any], signature: "RewardSignature") -> None:
        """Choose the signature by parameter names if it is ``auto``; raise ``UserError`` if they are ambiguous or do
        not fit.
        """
        self.function = function
        self.parameters = _parameters(function)
        self.signature = _choose(self.parameters, signature)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def batched(self) -> bool:
        """Return whether it benefits from several completions at once."""
        return self.is_async or self.signature in BATCHES

    def replies(self, calls: Sequence[Call], timeout: float) -> tuple[list[Reply], bool]:
        """Return the reply for each completion, and whether a coroutine did not end when it was cancelled.

        ``timeout``: seconds for each coroutine. A plain function has to be ended from outside.
        """
        if not self.is_async:
            return (self._batch(calls) if self.signature in BATCHES else [self._single(call) for call in calls]), False
        parts = [calls] if self.signature in BATCHES else [[call] for call in calls]
        self._loop = self._loop or asyncio.new_event_loop()  # one for all batches: clients of servers belong to a loop
        done, stuck = self._loop.run_until_complete(_gather([self._coroutine(part) for part in parts], timeout))
        late: Reply = ("late",)
        replies = [found or [late] * len(part) for found, part in zip(done, parts, strict=True)]
        return [reply for found in replies for reply in found], stuck

    def _single(self, call: Call) -> Reply:
        return _guarded(lambda: [self._value(self._call([call]))])[0]

    def _batch(self, calls: Sequence[Call]) -> list[Reply]:
        return _spread(_guarded(lambda: self._values(self._call(calls), len(calls))), len(calls))

    async def _coroutine(self, calls: Sequence[Call]) -> list[Reply]:
        """Return the replies to calls that the function handles at once."""
        try:
            result = await self._call(calls)
        except BaseException as error:
            return _spread([_raised(error)], len(calls))
        if self.signature in BATCHES:
            return _spread(_guarded(lambda: self._values(result, len(calls))), len(calls))
        return _guarded(lambda: [self._value(result)])

    def _call(self, calls: Sequence[Call]) -> Any:
        """Call the function, which may return a coroutine."""
        if self.signature in BATCHES:
            return self.function(**self._accepted(trl_arguments(calls, self.signature == "trl_messages")))
        (call,) = calls
        if self.signature == "verl":
            return self.function(**self._accepted(verl_arguments(call)))
        return self.function(call.text, call.item)

    def _accepted(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the function accepts; raise ``UserError`` if it needs one that is missing."""
        own = self.parameters or {}
        if any(p.kind is p.VAR_KEYWORD for p in own.values()):
            taken = given
        else:
            taken = {name: value for name, value in given.items() if name in own}
        needed = [name for name, p in own.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, *POSITIONS)]
        missing = next((name for name in needed if name not in taken), None)
        if missing is not None:
            why = "is TRL's own" if missing in TRL_ONLY else "no column has"
            raise UserError(f"needs {missing!r}, which {why}: there are {', '.join(given)}")
        return taken

    def _values(self, result: Any, count: int) -> list[Value]:
        """Return the values of a batch; raise ``UserError`` unless there is one per completion."""
        try:
            values = list(result)
        except TypeError:
            values = None
        if values is None or isinstance(result, str | Mapping):
            raise UserError(f"returned {str(result)[:SHOWN]!r}: a list with a number for each completion is wanted")
        if len(values) != count:
            raise UserError(f"returned {len(values)} rewards for {count} completions: one for each is wanted")
        return [None if value is None else self._value(value) for value in values]

    def _value(self, result: Any) -> Value:
        """Return a number, or the parts of a mapping; raise ``UserError`` for anything else."""
        if isinstance(result, Mapping):
            return _parts(result)
        number = _number(result)
        if number is None or not math.isfinite(number):
            raise UserError(f"returned {str(result)[:SHOWN]!r}: a finite number is wanted")
        return number


POSITIONS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return a function's parameters by name; None if it does not expose them, like some C functions."""
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):
        return None


def _choose(parameters: Mapping[str, inspect.Parameter] | None, given: "RewardSignature") -> "RewardSignature":
    """Return the signature that fits the parameters; raise ``UserError`` if it is unclear or contradicts ``given``."""
    if parameters is None:
        return "text" if given == "auto" else given
    names = f"({', '.join(str(p).partition(':')[0].partition('=')[0] for p in parameters.values())})"
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if given in (*BATCHES, "verl"):
        wanted = VERL if given == "verl" else TRL
        if wanted not in parameters and not anything and not (given != "verl" and IDS in parameters):
            raise UserError(f"takes {names} and no {wanted!r}: task.reward_signature={given} does not fit")
        return given
    found: list[RewardSignature] = ["trl"] if TRL in parameters or IDS in parameters else []
    found += ["verl"] if VERL in parameters else []
    hint = f"{KNOWN}; set task.reward_signature to one of {', '.join(SIGNATURES)}"
    if given == "auto" and len(found) == 1:
        return found[0]
    only_stars = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values())
    if given == "auto" and (found or (anything and only_stars)):
        raise UserError(f"takes {names}, which may be more than one signature: {hint}")
    try:
        inspect.Signature(list(parameters.values())).bind("", {})
    except TypeError:
        raise UserError(f"takes {names}, which is no signature of a reward: {hint}") from None
    return "text"


# ---- arguments


def trl_arguments(calls: Sequence[Call], messages: bool) -> dict[str, list[Any]]:
    """Return prompts, completions and the columns of their rows, by name, as TRL passes them.

    ``messages``: completions are lists of one message, for any kind of question.
    """
    prompts = [call.item.get("question", "") for call in calls]
    listed = [messages or isinstance(prompt, list) for prompt in prompts]
    asked = [
        [{"role": "user", "content": prompt}] if as_list and not isinstance(prompt, list) else prompt
        for prompt, as_list in zip(prompts, listed, strict=True)
    ]
    answered = [
        [{"role": "assistant", "content": call.text}] if as_list else call.text
        for call, as_list in zip(calls, listed, strict=True)
    ]
    rows = [_columns(call.item) for call in calls]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    ids = {} if any(call.token_ids is None for call in calls) else {IDS: [list(call.token_ids or ()) for call in calls]}
    return {**columns, **ids, "prompts": asked, TRL: answered}


def _columns(item: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a row: its own, plus question and answer under these names if it lacks them."""
    row = item.get("metadata")
    own = {str(name): value for name, value in row.items()} if isinstance(row, Mapping) else {}
    named = {name: value for name, value in item.items() if name != "metadata"} | own
    return {name: value for name, value in named.items() if name not in ("prompt", "completion", IDS)}


def verl_arguments(call: Call) -> dict[str, Any]:
    """Return the arguments of verl's ``compute_score``; the task supplies what the row lacks."""
    row = call.item.get("metadata")
    row = row if isinstance(row, Mapping) else {}
    return {
        "data_source": row.get("data_source") or call.task,
        "solution_str": call.text,
        "ground_truth": call.item.get("answer"),
        "extra_info": row["extra_info"] if isinstance(row.get("extra_info"), Mapping) else dict(row),
    }


# ---- values


def _number(value: Any) -> float | None:
    """Return a number, also from an array or tensor of one element; None otherwise."""
    if not isinstance(value, Real | SupportsFloat):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # for instance an array of several elements
        return None


def _parts(result: Mapping[Any, Any]) -> dict[str, float | None]:
    """Return the parts of a mapping; texts beside ``score``, as verl's functions return, become None."""
    parts: dict[str, float | None] = {}
    for name, value in result.items():
        if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or len(name) > SHOWN:
            raise UserError(f"returned a part {str(name)[:SHOWN]!r}: names of letters, digits and _ are wanted")
        parts[name] = number = _number(value)
        text = number is None and value is not None and name != "score" and "score" in result
        if not (text or value is None or (number is not None and math.isfinite(number))):
            raise UserError(f"returned {str(value)[:SHOWN]!r} as {name!r}: a finite number or None is wanted")
    if not parts:
        raise UserError("returned no parts: at least one is wanted")
    return parts


# ---- replies


def _guarded(made: Callable[[], Sequence[Value]]) -> list[Reply]:
    """Return values as replies; a single reply if anything fails, whatever the user's function raises."""
    try:
        return [("value", value) for value in made()]
    except UserError as error:
        return [("wrong", str(error))]
    except BaseException as error:
        return [_raised(error)]


def _raised(error: BaseException) -> Reply:
    if isinstance(error, UserError):
        return ("wrong", str(error))
    line = one_line(error) + MESSAGES * ("string indices must be" in str(error))
    return ("raised", line, "".join(traceback.format_exception(error)))


def _spread(replies: list[Reply], count: int) -> list[Reply]:
    """Return a reply for each of ``count`` completions, repeating a single common reply."""
    return replies if len(replies) == count else replies * count


def one_line(error: BaseException) -> str:
    """Return an exception as one line: ``ValueError: no such file``."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


async def _gather(
    works: Sequence[Coroutine[Any, Any, list[Reply]]], timeout: float
) -> tuple[list[list[Reply] | None], bool]:
    """Return the result of each coroutine, None for those that took too long, and whether one did not end."""
    tasks = [asyncio.ensure_future(work) for work in works]
    _, pending = await asyncio.wait(tasks, timeout=timeout)
    for task in pending:
        task.cancel()
    stuck = bool(pending and (await asyncio.wait(pending, timeout=CANCEL_SECONDS))[1])
    return [None if task in pending else task.result() for task in tasks], stuck
