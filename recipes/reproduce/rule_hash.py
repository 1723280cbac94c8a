"""Hash of a rule's code: every result records the rule that judged it.

The rule of a study is every definition that turns its numbers into verdicts: its ``RULES``, and the code of
``recipes.reproduce`` that applies them. Declared studies hold them in ``study.py``, the others in ``findings.py``. The
hash covers the syntax tree of each definition, without docstrings and annotations. It ignores imports, comments,
formatting, file names, and code that no part of the rule mentions. So a rule may move or be reformatted under the same
hash, but any change to it changes the hash.
"""

import ast
import hashlib
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from bebop.bench import record
from recipes.reproduce import measured, rules, verdicts

PACKAGE = __name__.rpartition(".")[0]
DECLARED = "study"  # the module of a study that is a declaration (``harness.py``)
ROOT = record.ROOT
ENTRIES = ("RULES", "judge", "corrected", "overall")
# Fields of a node that the hash ignores.
UNCOUNTED = ("annotation", "returns", "type_comment", "type_params", "ctx", "kind", "simple")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCode:
    """The code of a study's rule: its hash, and the files that hold it, relative to the repository."""

    hash: str
    files: tuple[str, ...]


def declared(study: str) -> bool:
    """Return whether a study is a declaration; the others hold their rules in ``findings.py``."""
    return Path(__file__).parent.joinpath(*study.split("."), f"{DECLARED}.py").is_file()


def all_declared() -> list[str]:
    """Return the names of the studies that are declarations, sorted."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob(f"*/{DECLARED}.py"))


def module(study: str) -> ModuleType:
    """Import and return the module that holds a study's rules."""
    return importlib.import_module(f"{PACKAGE}.{study}.{DECLARED if declared(study) else 'findings'}")


def of_study(name: str) -> RuleCode:
    """Return the code of a study's rule in the working tree."""
    own = module(name)
    shared = (*_borrowed(own), rules) if declared(name) else ()
    paths = [Path(str(m.__file__)).resolve() for m in (own, *shared, verdicts, measured)]
    files = tuple(path.relative_to(ROOT).as_posix() for path in paths)
    return RuleCode(hash=of_sources([path.read_text() for path in paths], ENTRIES), files=files)


def _borrowed(own: ModuleType) -> list[ModuleType]:
    """Return the declarations of other studies that a study imports from: its rules may depend on them."""
    imports = [node.module for node in ast.parse(Path(str(own.__file__)).read_text()).body
               if isinstance(node, ast.ImportFrom)]  # fmt: skip
    ends = f".{DECLARED}"
    return [importlib.import_module(name) for name in imports
            if name and name.endswith(ends) and name != PACKAGE + ends]  # fmt: skip


def of_sources(sources: Iterable[str], entries: Sequence[str]) -> str:
    """Return a hash of the definitions ``entries`` and of all definitions that they mention, directly or not."""
    text = "\n".join(sorted(_text(node) for _, node in reached(sources, entries)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def reached(sources: Iterable[str], entries: Sequence[str]) -> list[tuple[int, ast.stmt]]:
    """Return the definitions that ``of_sources`` hashes, each with the index of its source."""
    known: dict[str, list[tuple[int, ast.stmt]]] = {}
    mentions: dict[str, set[str]] = {}
    for place, source in enumerate(sources):
        for node in ast.parse(source).body:
            for name in _defines(node):
                known.setdefault(name, []).append((place, node))
                used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                mentions[name] = mentions.get(name, set()) | used
    chosen: set[str] = set()
    waiting = [name for name in entries if name in known]
    while waiting:
        name = waiting.pop()
        if name not in chosen:
            chosen.add(name)
            waiting += [used for used in mentions[name] if used in known]
    return [one for name in chosen for one in known[name]]


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _text(node: object) -> str:
    """Return a syntax tree as text that is equal in every Python version: empty and uncounted fields are left out."""
    if isinstance(node, list):
        return "[" + ", ".join(_text(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    kind, fields = type(node).__name__, dict(ast.iter_fields(node))
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        kind, fields = "Assign", {"targets": [node.target], "value": node.value}
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    kept = {k: v for k, v in fields.items() if k not in UNCOUNTED and v is not None and v != []}
    return f"{kind}(" + ", ".join(f"{name}={_text(value)}" for name, value in kept.items()) + ")"
