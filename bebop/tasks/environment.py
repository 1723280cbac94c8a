"""Interface of environments, the table of built-in ones, and the loading of a user's environment.

An environment answers a policy turn by turn: ``reset`` returns the first messages, ``step`` the reply to one turn. Each
trajectory has its own environment object. ``reset`` and ``step`` depend only on the question, the seed and the texts,
so a lost trajectory can begin again, and all members of a group begin alike.

Every text that a policy can write gets a reply: a senseless call, or a command that runs too long, is an observation.
Exceptions are for failures that are never the policy's fault.

A row of ``ENVIRONMENTS`` names a class and a function that draws its questions. An environment of the user is
``path/to/file.py:Class``, where the class may have

- ``item(index, seed, **args)``, a static method that returns question ``index``; the default is ``{"index": index}``;
- ``blocking = False``: its methods wait only in ``await``, so it needs no process of its own;
- ``tokens = True`` and ``command = "seconds"``: see ``EnvironmentKind``.

Both receive the entries of ``task.args`` for which they have a parameter, by name.
"""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from bebop.errors import UserError
from bebop.tasks.functions import load_file

Message = Mapping[str, str]  # {"role": one of ROLES, "content": text}
ROLES = ("system", "user", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """Reply of an environment to one turn.

    >>> EnvStep(messages=({"role": "user", "content": "more"},), counts={"tool_errors": 0.0})  # doctest: +SKIP
    """

    messages: tuple[Any, ...] = ()  # of Message: what the policy reads next; of int if the kind has ``tokens``
    reward: float = 0.0  # summed over the steps of a trajectory
    done: bool = False  # the trajectory ends here
    counts: Mapping[str, float] = field(default_factory=dict)  # further counts by name, summed likewise


class EnvironmentLost(Exception):
    """Failure that is never the policy's fault: a crash, a time limit, a connection. The message is one line."""


class Environment(Protocol):
    """Environment of one trajectory. It raises ``UserError`` for faults that the user can fix; other errors mean it is
    lost.
    """

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        """Return the first messages of a question. This is the first call, made once."""
        ...

    async def step(self, text: str) -> EnvStep:
        """Return the reply to a turn of the policy, whose stop token is left out."""
        ...

    async def close(self) -> None:
        """Release all resources. It may be called more than once, and also after a failure."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentKind:
    """Class of an environment, the function that draws its questions, and how it runs.

    >>> EnvironmentKind(make="bebop.tasks.environments.guess:Guess", item="bebop.tasks.environments.guess:item")
    ... # doctest: +SKIP
    """

    make: str  # "package.module:Class" or "path/to/file.py:Class", imported when chosen, called as Class(**args)
    item: str = ""  # likewise, a pure function (index, seed, **args) -> dict that draws questions; "": {"index": index}
    blocking: bool = False  # its methods wait for files or programs: it runs in a process that can be killed
    reaches: bool = False  # its arguments name code to run or servers: not from the run folder of somebody else
    command: str = ""  # the argument that bounds, in seconds, what one step runs for the policy
    tokens: bool = False  # it renders for itself: messages are token ids, and step receives the whole Completion
    listed: bool = False  # its questions are a list: their numbers name them, and no seed gives others

    @property
    def name(self) -> str:
        """Return the name in ``ENVIRONMENTS``; ``make`` if it has none."""
        return next((name for name, kind in ENVIRONMENTS.items() if kind == self), self.make)


OURS = "bebop.tasks.environments"
ENVIRONMENTS: dict[str, EnvironmentKind] = {
    "guess": EnvironmentKind(make=f"{OURS}.guess:Guess", item=f"{OURS}.guess:item"),
    "store": EnvironmentKind(make=f"{OURS}.store:Store", item=f"{OURS}.store:item"),
    "calc": EnvironmentKind(make=f"{OURS}.calc:Calc", item=f"{OURS}.calc:item"),
    "openenv": EnvironmentKind(
        make=f"{OURS}.openenv_client:OpenEnv",
        item=f"{OURS}.openenv_client:item",
        reaches=True,
    ),
    "verifiers": EnvironmentKind(
        make=f"{OURS}.verifiers_episode:Verifiers",
        item=f"{OURS}.verifiers_episode:item",
        reaches=True,
        tokens=True,
        listed=True,
    ),
}


def seed(base: int, index: int) -> int:
    """Return the seed of ``reset`` for question ``index`` < 2**32; all members of a group share it."""
    return (base << 32) + index


def find_kind(name: str) -> EnvironmentKind:
    """Return the environment called ``name`` or ``path/to/file.py:Class``, importing it; raise ``UserError`` on
    failure.
    """
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    where, _, attribute = name.rpartition(":")
    if not attribute or Path(where).suffix != ".py":
        close = difflib.get_close_matches(name, ENVIRONMENTS)
        hint = f"; did you mean {close[0]}?" if close else ""
        allowed = f"give {', '.join(ENVIRONMENTS)} or path/to/file.py:Class"
        raise UserError(f"task.name={name!r} is not possible for an environment: {allowed}{hint}")
    make = f"{Path(where).resolve()}:{attribute}"
    chosen = load_class(make)
    own = isinstance(inspect.getattr_static(chosen, "item", None), staticmethod)
    tokens = bool(getattr(chosen, "tokens", False))
    blocking = bool(getattr(chosen, "blocking", not tokens))
    if tokens and blocking:
        raise UserError(f"environment {make}: tokens = True and blocking = True are not possible together")
    command = str(getattr(chosen, "command", ""))
    if command and command not in inspect.signature(chosen).parameters:
        raise UserError(f"environment {make}: command = {command!r} is no argument of the class")
    return EnvironmentKind(
        make=make, item=f"{make}.item" if own else "", blocking=blocking, command=command, tokens=tokens
    )


def question(kind: EnvironmentKind, index: int, seed: int, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return question ``index`` >= 0 of the stream with this seed, the input of ``reset``; raise ``UserError`` on
    failure.
    """
    chosen, _ = arguments(kind, args)
    if not kind.item:
        return {"index": index}
    try:
        made = load(kind.item)(index, seed, **chosen)
    except UserError:
        raise
    except Exception as error:  # arguments, and maybe the function, come from the user
        raise UserError(f"environment {kind.name} cannot make question {index}: {one_line(error)}") from error
    if not isinstance(made, dict):
        raise UserError(f"environment {kind.name}: question {index} is {str(made)[:80]!r}: a dict is wanted")
    return made


def arguments(kind: EnvironmentKind, args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the question function and of the class; raise ``UserError`` for an unknown or missing
    one.
    """
    of_item = list(inspect.signature(load(kind.item)).parameters.values())[2:] if kind.item else []
    of_class = list(inspect.signature(load_class(kind.make)).parameters.values())
    named = {p.name: p for p in (*of_item, *of_class) if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    free = any(p.kind is p.VAR_KEYWORD for p in (*of_item, *of_class))
    allowed = f"there are {', '.join(sorted(named))}" if named else "it has none"
    for key, value in args.items():
        if key not in named and not free:
            close = difflib.get_close_matches(key, named)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"task.args.{key}={value!r}: environment {kind.name} has no such argument: {allowed}{hint}")
    missing = [name for name, p in named.items() if p.default is p.empty and name not in args]
    if missing:
        raise UserError(f"task.args.{missing[0]} is missing: environment {kind.name} needs it")
    return _accepted(of_item, args), _accepted(of_class, args)


def check_command(kind: EnvironmentKind, args: Mapping[str, Any], step_seconds: float) -> None:
    """Raise ``UserError`` unless a command of the policy always ends before its step counts as lost."""
    if not kind.command:
        return
    default = inspect.signature(load_class(kind.make)).parameters[kind.command].default
    bound = args.get(kind.command, default)
    if isinstance(bound, int | float) and not bound < step_seconds:
        raise UserError(
            f"task.args.{kind.command}={bound} is not possible: a command that runs so long is the policy's, and it "
            f"would count as lost after task.environment.step_seconds={step_seconds}: give less than that"
        )


def _accepted(parameters: Sequence[inspect.Parameter], args: Mapping[str, Any]) -> dict[str, Any]:
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(args)
    names = {p.name for p in parameters}
    return {key: value for key, value in args.items() if key in names}


def load_class(spec: str) -> type[Environment]:
    """Import a class; raise ``UserError`` if it lacks a method of ``Environment``."""
    chosen = load(spec)
    if not isinstance(chosen, type):
        raise UserError(f"environment {spec}: it is no class")
    missing = [name for name in ("reset", "step", "close") if not inspect.iscoroutinefunction(getattr(chosen, name, 0))]
    if missing:
        raise UserError(
            f"environment {spec}: its class has no 'async def {missing[0]}': it needs reset, step and close"
        )
    return chosen


def load(spec: str) -> Callable[..., Any]:
    """Import ``package.module:name`` or ``path/to/file.py:name``, where dots access class members; raise ``UserError``
    on failure.
    """
    where, _, names = spec.rpartition(":")
    try:
        found: Any = _module(where)
    except UserError:
        raise
    except BaseException as error:  # importing runs code that may raise anything, SystemExit too
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"environment {spec} cannot be imported: {one_line(error)}") from error
    for name in names.split("."):
        if not hasattr(found, name):
            close = difflib.get_close_matches(name, [k for k, v in vars(found).items() if callable(v)])
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"environment {spec}: {where} has no {name!r}{hint}")
        found = getattr(found, name)
    return found


def _module(where: str) -> ModuleType:
    return _file(Path(where)) if where.endswith(".py") else importlib.import_module(where)


@functools.cache
def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"environment {path}: there is no such Python file")
    return load_file(path, "environment")


def checked_messages(value: Any, name: str, tokens: bool = False) -> tuple[Any, ...]:
    """Return an environment's messages as plain dicts, or its token ids; raise ``UserError`` if they are malformed."""
    if tokens:
        if not isinstance(value, tuple | list) or not all(type(token) is int and token >= 0 for token in value):
            raise UserError(f"environment {name} gave {str(value)[:80]!r}: a tuple of token ids is wanted")
        return tuple(value)
    if not isinstance(value, tuple | list):
        raise UserError(f"environment {name} gave {str(value)[:80]!r}: a tuple of messages is wanted")
    for message in value:
        known = isinstance(message, Mapping) and {*message} == {"role", "content"} and message["role"] in ROLES
        if not known or not isinstance(message["content"], str):
            wanted = f"role, one of {', '.join(ROLES)}, and content, a text, are wanted"
            raise UserError(f"environment {name} gave {str(message)[:80]!r} for a message: {wanted}")
    return tuple({"role": str(message["role"]), "content": str(message["content"])} for message in value)


def checked_step(value: Any, name: str, tokens: bool = False) -> EnvStep:
    """Return an environment's step with plain types; raise ``UserError`` if it is malformed."""
    if not isinstance(value, EnvStep):
        raise UserError(f"environment {name}: step returned {str(value)[:80]!r}: an EnvStep is wanted")
    try:
        counts = {str(key): float(number) for key, number in value.counts.items()}
        reward = float(value.reward)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"environment {name}: reward and counts of a step are numbers: {one_line(error)}") from error
    messages = checked_messages(value.messages, name, tokens)
    return EnvStep(messages=messages, reward=reward, done=bool(value.done), counts=counts)


def last_line(text: str) -> str:
    """Return the last non-blank line of a turn: the action, after any thoughts."""
    return (text.strip().splitlines() or [""])[-1].strip()


def one_line(error: BaseException) -> str:
    """Return an exception as one line: ``ValueError: no such file``."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
