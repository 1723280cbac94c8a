"""One bad input: a command, what it is given, and what its one line must name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Given = str | tuple[str, ...]  # a text is split at blanks
Table = Mapping[str, Sequence[tuple[Given, str] | tuple[Given, str, Mapping[str, str]]]]  # kind -> rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Braces in arguments, names and environment are filled in: ``{here}`` is the working folder, see ``World.put``."""

    command: str
    kind: str  # what is wrong: grammar, types, numbers, checkpoints, ...
    arguments: tuple[str, ...]
    names: str  # a part of the line
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Short, for the list of tests."""
        extra = " ".join(f"{name}={value}" for name, value in self.environment.items())
        text = ascii(" ".join((*((extra,) if extra else ()), *self.arguments)))[1:-1]
        return f"{self.command} {text[:70]}"

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two cases one."""
        return (self.command, self.arguments, *sorted(self.environment.items()))

    def filled(self, put: Callable[[str], str]) -> "Case":
        """With what stands in braces put in."""
        return Case(
            command=self.command, kind=self.kind, arguments=tuple(map(put, self.arguments)), names=put(self.names),
            environment={name: put(value) for name, value in self.environment.items()},
        )  # fmt: skip


def cases(command: str, table: Table) -> Iterator[Case]:
    """The rows of a table."""
    for kind, rows in table.items():
        for given, names, *environment in rows:
            arguments = tuple(given.split()) if isinstance(given, str) else given
            yield Case(
                command=command, kind=kind, arguments=arguments, names=names,
                environment=environment[0] if environment else {},
            )  # fmt: skip
