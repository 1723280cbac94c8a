"""Files, names and links where packaging expects them, pins within their bounds, and the wheel itself.

Every rule is a function of paths or of text, so that a planted violation can be given to it; each has one.
"""

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement
from setuptools import find_namespace_packages

from tests.tree import LENT, LINKS, ROOT, SKIPPED, files, lent, sources, under

BARE = ("rollout", "trainer", "kernels", *LENT)  # folders that must not become packages of their own
# Names that would hide a library when a script is run from its own folder.
LIBRARIES = (
    "torch triton transformers tokenizers safetensors numpy yaml tqdm tensorboard datasets pytest ray hydra omegaconf "
    "sglang vllm verl megatron plotly wandb verifiers renderers"
)
TAKEN = {*sys.stdlib_module_names, *LIBRARIES.split()}
MACHINE_PATH = re.compile(r"(?<![\w.}/])/(?:work|tmp|home|root|opt|mnt|Users)/\w+")


# ---- the rules


def init_violations(paths: Sequence[Path]) -> list[str]:
    """A regular package ``kernels`` at the root would hide Hugging Face's, which others import."""
    inside = [p for p in paths if p.name == "__init__.py"]
    return [str(p) for p in inside if p.parts[0] in BARE or "/".join(p.parts[:2]) in BARE]


def name_violations(paths: Sequence[Path]) -> list[str]:
    """Modules named like something on the path."""
    return [str(p) for p in paths if p.suffix == ".py" and p.stem in TAKEN]


def link_violations(root: Path) -> list[str]:
    """Links inside bebop/ that are missing, absolute, or lead nowhere."""
    places = {name: name for name in LINKS} | LENT
    links = {name: root / "bebop" / place for name, place in places.items()}
    return [
        name
        for name, link in links.items()
        if not link.is_symlink() or link.readlink() != Path("..") / name or not link.is_dir()
    ]


def path_violations(text: str) -> list[str]:
    """Paths of one particular machine."""
    return MACHINE_PATH.findall(text)


def data_violations(paths: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Files inside the package that no wheel would hold."""
    return [p for p in paths if not p.endswith(".py") and not any(fnmatch(p.split("/")[-1], g) for g in patterns)]


def pin_violations(wanted: Sequence[str], pins: Sequence[str]) -> list[str]:
    """Requirements without a pin, and pins that the requirement's bounds do not admit."""
    pinned = dict(line.lower().replace("_", "-").split("==") for line in pins if "==" in line)
    needed = {r.name.lower().replace("_", "-"): r for r in map(Requirement, wanted)}
    return [str(r) for name, r in needed.items() if name not in pinned or not r.specifier.contains(pinned[name])]


# ---- the tree keeps them


def test_files_keep_their_places_and_names() -> None:
    paths = list(files())
    assert init_violations(paths) == []
    assert name_violations([p for p in paths if p.parts[0] != "tests"]) == []
    assert link_violations(ROOT) == []


def test_no_file_holds_a_machine_path() -> None:
    kinds = (".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".sh", ".svg", ".jinja", "")
    texts = {p: (ROOT / p).read_text() for p in files() if p.suffix in kinds}
    assert {str(p): found for p, text in texts.items() if (found := path_violations(text))} == {}


def shipped(path: Path) -> str | None:
    """The name of a file in the wheel; None if it stays out: of a lent recipe, its modules and settings are shipped."""
    if path.name == "README.md":
        return None
    if (place := lent(path)) is not None:
        return str(place) if path.suffix in (".py", ".yaml", ".json") else None
    if path.parts[0] in LINKS:
        return f"bebop/{path}"
    return str(path) if path.parts[0] == "bebop" else None


def test_packages_and_data_are_complete() -> None:
    packages = set(find_namespace_packages(str(ROOT), include=["bebop*"]))
    tree = sources()
    missing = {m for m in tree if under(m, "bebop") and m not in packages and m.rpartition(".")[0] not in packages}
    assert missing == set()
    inside = [name for p in files() if (name := shipped(p))]
    assert data_violations(inside, settings()["tool"]["setuptools"]["package-data"]["*"]) == []


def test_pins_fit_the_bounds() -> None:
    project = settings()["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["docs"]]
    assert pin_violations(wanted, (ROOT / "constraints.txt").read_text().splitlines()) == []


def settings() -> dict:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


# ---- planted violations


def test_planted_files_are_caught(tmp_path: Path) -> None:
    assert init_violations(
        [Path("kernels/__init__.py"), Path("rollout/decoding/__init__.py"), Path("conf/__init__.py")]
    ) == ["kernels/__init__.py", "rollout/decoding/__init__.py"]
    places = ("bebop/types.py", "rollout/queue.py", "kernels/triton.py", "bebop/driver/buffer.py")
    names = [Path(place) for place in places]
    assert name_violations([*names, Path("recipes/verl/verl.py")]) == [*map(str, names[:3]), "recipes/verl/verl.py"]
    (tmp_path / "bebop").mkdir()
    for name in LINKS[1:]:
        (tmp_path / name).mkdir()
    (tmp_path / "bebop" / "trainer").symlink_to("../trainer")  # right
    (tmp_path / "bebop" / "kernels").symlink_to(tmp_path / "kernels")  # absolute
    (tmp_path / "bebop" / "conf").mkdir()  # a copy
    assert link_violations(tmp_path) == ["rollout", "kernels", "conf", *LENT]


def test_planted_text_is_caught() -> None:
    assert path_violations("run it in /" + "home/ada/bebop") and path_violations('"/' + 'tmp/x"')
    assert path_violations("https://example.org/docs/x and runs/tmp/y and ../opt/z") == []
    assert data_violations(["bebop/model/tiny/merges.txt", "conf/a.yaml", "bebop/x.py"], ["*.yaml"]) == [
        "bebop/model/tiny/merges.txt"
    ]
    assert pin_violations(["ruff<0.16", "a_b>=1", "c"], ["ruff==0.17.6", "A-b==1.2"]) == ["ruff<0.16", "c"]


# ---- the wheel itself


@pytest.mark.slow
def test_wheel_holds_everything(tmp_path: Path) -> None:
    source = tmp_path / "source"
    copytree(ROOT, source, symlinks=True, ignore=ignore_patterns(*SKIPPED))  # a build leaves folders behind
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True, stdin=subprocess.DEVNULL)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        held = {name for name in wheel.namelist() if name.startswith("bebop/")}
    assert held == {name for p in files() if (name := shipped(p))}
    for folder in ("bebop/rollout", "bebop/trainer", "bebop/kernels", "bebop/conf/rollout", "bebop/model/tiny"):
        assert any(name.startswith(f"{folder}/") for name in held), folder
