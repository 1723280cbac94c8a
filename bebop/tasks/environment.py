"""What an environment is, which there are, and how one of the user's own is found.

An environment answers a policy turn by turn: ``reset`` gives the first messages, ``step`` what is said to one turn. It
is one object per trajectory. ``reset`` and ``step`` depend on the question, the seed and the texts alone, so that a
trajectory that was lost can begin again, and the members of a group begin alike.

Whatever a policy can write is answered: a call that makes no sense, or a command of it that runs too long, is an
observation. Exceptions are for what is never its fault.

A row of ``ENVIRONMENTS`` names a class and a function that draws its questions. One of the user's own is
``path/to/file.py:Class``, where the class may have

- ``item(index, seed, **args)``, a static method: question number ``index``; without one it is ``{"index": index}``;
- ``blocking = False``: its methods never wait but in ``await``, so it needs no process of its own;
- ``tokens = True``: see ``EnvironmentKind``.

``task.args`` goes to both by name: each is given those that it has a parameter for.
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
from bebop.tasks.user_files import load_file

Message = Mapping[str, str]  # {"role": one of ROLES, "content": text}
ROLES = ("system", "user", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """What an environment makes of a turn.

    >>> EnvStep(messages=({"role": "user", "content": "more"},), counts={"tool_errors": 0.0})  # doctest: +SKIP
    """

    messages: tuple[Any, ...] = ()  # of Message: what the policy reads next; of int if the kind has ``tokens``
    reward: float = 0.0  # added over the steps of a trajectory
    done: bool = False  # the trajectory ends here
    counts: Mapping[str, float] = field(default_factory=dict)  # what else is counted, by name; added likewise


class EnvironmentLost(Exception):
    """Never the policy's fault: a crash, a time limit of ``reset`` or ``step``, a connection. One line."""


class Environment(Protocol):
    """One trajectory's. Raises ``UserError`` for what the user can put right, anything else where it is lost."""

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        """The first messages, for a question; called once, first."""
        ...

    async def step(self, text: str) -> EnvStep:
        """What it says to a turn of the policy, without what ended it."""
        ...

    async def close(self) -> None:
        """Give back what it holds. Called more than once, and also after it was lost."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentKind:
    """Where an environment comes from.

    >>> EnvironmentKind(make="bebop.tasks.environments.guess:Guess", item="bebop.tasks.environments.guess:item")
    ... # doctest: +SKIP
    """

    make: str  # "package.module:Class" or "path/to/file.py:Class", imported when chosen; it is made as Class(**args)
    item: str = ""  # likewise, of (index, seed, **args) -> dict: the question with this number, pure; "": its number
    blocking: bool = False  # its methods wait for files or programs: it runs in a process that can be ended
    reaches: bool = False  # its arguments name code to run or servers: not from the run folder of somebody else
    command: str = ""  # the argument that bounds, in seconds, what one step runs for the policy
    tokens: bool = False  # it renders for itself: messages are token ids, and step is given the whole Completion
    what: str = ""  # one line

    @property
    def name(self) -> str:
        """Its name in the registry; ``make`` if it has none."""
        return next((name for name, kind in ENVIRONMENTS.items() if kind == self), self.make)


OURS = "bebop.tasks.environments"
ENVIRONMENTS: dict[str, EnvironmentKind] = {
    "guess": EnvironmentKind(
        make=f"{OURS}.guess:Guess",
        item=f"{OURS}.guess:item",
        what="find a number in few tries; the built-in model can learn it",
    ),
    "store": EnvironmentKind(
        make=f"{OURS}.store:Store",
        item=f"{OURS}.store:item",
        what="follow a chain of keys through a store, 4 to 30 turns",
    ),
    "calc": EnvironmentKind(
        make=f"{OURS}.calc:Calc",
        item=f"{OURS}.calc:item",
        what="work out a long expression with a calculator",
    ),
    "bugfix": EnvironmentKind(
        make=f"{OURS}.bugfix:Bugfix",
        item=f"{OURS}.bugfix:item",
        blocking=True,
        command="seconds",
        what="mend a small Python package with commands in a sandbox, up to 60 turns",
    ),
    "openenv": EnvironmentKind(
        make=f"{OURS}.openenv_client:OpenEnv",
        item=f"{OURS}.openenv_client:item",
        reaches=True,
        what="episodes on an OpenEnv 0.3 server, by its address",
    ),
    "verifiers": EnvironmentKind(
        make=f"{OURS}.verifiers_episode:Verifiers",
        item=f"{OURS}.verifiers_episode:item",
        reaches=True,
        tokens=True,
        what="an installed verifiers 0.4 environment, by the id of its taskset",
    ),
}


def seed(base: int, index: int) -> int:
    """What ``reset`` is given for question number ``index``, below 2**32; the same for all members of its group."""
    return (base << 32) + index


def find_kind(name: str) -> EnvironmentKind:
    """The environment called ``name``, or ``path/to/file.py:Class``; ``UserError``. Runs the file's module."""
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
    doc = (inspect.getdoc(chosen) or "").partition("\n")[0]
    tokens = bool(getattr(chosen, "tokens", False))
    blocking = bool(getattr(chosen, "blocking", not tokens))
    if tokens and blocking:
        raise UserError(f"environment {make}: tokens = True and blocking = True are not possible together")
    return EnvironmentKind(make=make, item=f"{make}.item" if own else "", blocking=blocking, tokens=tokens, what=doc)


def question(kind: EnvironmentKind, index: int, seed: int, args: Mapping[str, Any]) -> dict[str, Any]:
    """Question number ``index`` >= 0 of the stream with this seed: what ``reset`` is given. ``UserError``."""
    chosen, _ = arguments(kind, args)
    if not kind.item:
        return {"index": index}
    try:
        made = load(kind.item)(index, seed, **chosen)
    except UserError:
        raise
    except Exception as error:  # the arguments are the user's, and so may be the function
        raise UserError(f"environment {kind.name} cannot make question {index}: {one_line(error)}") from error
    if not isinstance(made, dict):
        raise UserError(f"environment {kind.name}: question {index} is {str(made)[:80]!r}: a dict is wanted")
    return made


def arguments(kind: EnvironmentKind, args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of ``task.args`` those for the question and those for the class; ``UserError`` for one too many or too few."""
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
    return _taken(of_item, args), _taken(of_class, args)


def check_command(kind: EnvironmentKind, args: Mapping[str, Any], step_seconds: float) -> None:
    """``UserError`` unless what one step runs for the policy ends well before the step counts as lost."""
    if not kind.command:
        return
    default = inspect.signature(load_class(kind.make)).parameters[kind.command].default
    bound = args.get(kind.command, default)
    if isinstance(bound, int | float) and not bound < step_seconds:
        raise UserError(
            f"task.args.{kind.command}={bound} is not possible: a command that runs so long is the policy's, and it "
            f"would count as lost after task.environment.step_seconds={step_seconds}: give less than that"
        )


def _taken(parameters: Sequence[inspect.Parameter], args: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments that there is a parameter for."""
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(args)
    names = {p.name for p in parameters}
    return {key: value for key, value in args.items() if key in names}


def load_class(spec: str) -> type[Environment]:
    """The class behind ``make``; ``UserError`` if it has not the methods of an ``Environment``."""
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
    """What ``package.module:name`` or ``path/to/file.py:name`` names; dots go into classes. ``UserError``."""
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
    """A file of the user's as a module."""
    if not path.is_file():
        raise UserError(f"environment {path}: there is no such Python file")
    return load_file(path, "environment")


def checked_messages(value: Any, name: str, tokens: bool = False) -> tuple[Any, ...]:
    """Messages as an environment gave them, as plain dicts, or token ids; ``UserError`` if they are none."""
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
    """A step as an environment gave it, of plain types; ``UserError`` if it is none."""
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
    """The last line of a turn with anything in it: what is to be done, where thoughts may come before."""
    return (text.strip().splitlines() or [""])[-1].strip()


def one_line(error: BaseException) -> str:
    """An exception in one line: ``ValueError: no such file``."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
