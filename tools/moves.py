"""Move files and let everything that names them follow: ``python tools/moves.py tools/moves.yaml [ROOT]``.

The table maps old paths to new ones. A path may be a file or a folder, and a move that was made already is passed over,
so the script may run twice, and on a branch that began before the moves. It rewrites, in every text file of git:

- dotted names, in imports and in strings: ``bebop.loop`` becomes ``bebop.driver.loop``;
- ``from bebop import loop``, which becomes ``from bebop.driver import loop``, with ``as`` where the last name changes;
- paths: ``bebop/loop.py`` becomes ``bebop/driver/loop.py``.

It goes when the rebuild is done.
"""

import re
import subprocess
import sys
from pathlib import Path

import yaml

LINKED = ("rollout", "trainer", "kernels")  # bebop/<name> is a link to <name>
# Stored results name the files of their time; the table of moves names old paths by itself.
UNTOUCHED = (".json", ".jsonl", ".svg", ".png", ".safetensors", ".parquet", ".pt", ".xz", ".csv")


def module(path: str) -> str:
    """Return the dotted name of a file or folder: rollout/room.py is bebop.rollout.room."""
    parts = path.removesuffix("/__init__.py").removesuffix(".py").split("/")
    return ".".join(["bebop", *parts] if parts[0] in LINKED else parts)


def tracked(root: Path) -> list[Path]:
    """Return the text files that git knows below ``root``, links left out."""
    names = subprocess.run(["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True).stdout.split("\n")
    paths = [root / name for name in names if name and not name.endswith(UNTOUCHED)]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def make_moves(root: Path, moves: dict[str, str]) -> None:
    """Move what is still in its old place."""
    for old, new in moves.items():
        if not (root / old).exists():
            continue
        if (root / new).is_file():
            raise SystemExit(f"{new} exists and {old} would move there")
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        for init in package_inits(root, new):
            subprocess.run(["git", "add", init], cwd=root, check=True)
        subprocess.run(["git", "mv", old, new], cwd=root, check=True)


def package_inits(root: Path, new: str) -> list[str]:
    """Make ``__init__.py`` for new packages of bebop/ and tests/, and return those that were made."""
    made = []
    for folder in list(Path(new).parents)[:-2]:
        init = root / folder / "__init__.py"
        if folder.parts[0] == "bebop" and not init.exists():
            init.write_text(f'"""{folder.name}."""\n')
            made.append(str(folder / "__init__.py"))
    return made


def rewriter(moves: dict[str, str]) -> list[tuple[re.Pattern[str], dict[str, str]]]:
    """Return patterns with what replaces their matches: dotted names and paths, longest first."""
    dotted = {module(old): module(new) for old, new in moves.items()}
    inside: dict[str, list[str]] = {}  # package that has the name of a former module -> its modules
    for new in dotted.values():
        package, _, name = new.rpartition(".")
        inside.setdefault(package, []).append(name)
    names = []
    for old in sorted(dotted, key=len, reverse=True):
        within = "|".join(inside.get(old, ()))
        ahead = rf"(?!\.(?:{within})\b|[ ]import \(?\s*(?:{within})\b)" if within else ""
        names.append(re.escape(old) + ahead)
    paths = {old: new for old, new in moves.items()}
    paths |= {
        f"bebop/{o}": f"bebop/{n}" if n.startswith(LINKED) else n for o, n in moves.items() if o.startswith(LINKED)
    }
    return [
        (re.compile(r"(?<![\w./-])(?:" + "|".join(names) + r")(?![\w/])"), dotted),
        (
            re.compile(
                r"(?<![\w.-])(?<!\w/)(?:"
                + "|".join(re.escape(p) for p in sorted(paths, key=len, reverse=True))
                + r")(?![\w])"
            ),
            paths,
        ),
    ]


def rewrite_from(text: str, moves: dict[str, str]) -> str:
    """Rewrite ``from package import module`` where the module moved."""
    dotted = {module(old): module(new) for old, new in moves.items()}
    packages = {name.rpartition(".")[0] for name in dotted}

    def changed(match: re.Match[str]) -> str:
        indent, package, names = match.group(1), match.group(2), match.group(3) or match.group(4)
        if package not in packages:
            return match.group(0)
        kept, lines = [], []
        for item in (part.strip() for part in names.replace("\n", " ").split(",") if part.strip()):
            name, _, alias = (word.strip() for word in item.partition(" as "))
            new = dotted.get(f"{package}.{name}")
            if new is None:
                kept.append(item)
                continue
            home, _, last = new.rpartition(".")
            local = alias or name
            lines.append(f"{indent}from {home} import {last}" + (f" as {local}" if local != last else ""))
        if not lines:
            return match.group(0)
        if kept:
            lines.insert(0, f"{indent}from {package} import {', '.join(kept)}")
        return "\n".join(lines)

    pattern = re.compile(r"^([ \t]*)from (bebop[\w.]*|tests[\w.]*) import (?:\(([^)]*)\)|([^\n(#]+))", re.MULTILINE)
    return pattern.sub(changed, text)


def main(table: str, root: str = ".") -> None:
    """Make the moves of the table and rewrite what names them."""
    place = Path(root).resolve()
    moves: dict[str, str] = yaml.safe_load(Path(table).read_text())
    make_moves(place, moves)
    patterns = rewriter(moves)
    for path in tracked(place):
        if path.name == Path(table).name:
            continue
        try:
            before = path.read_text()
        except UnicodeDecodeError:
            continue
        after = rewrite_from(before, moves) if path.suffix == ".py" else before
        for pattern, names in patterns:
            after = pattern.sub(lambda match, names=names: names[match.group(0)], after)
        if after != before:
            path.write_text(after)
    subprocess.run(["git", "add", "-A"], cwd=place, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
