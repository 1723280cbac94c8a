"""Who may import whom, which names and files are allowed where, and that packaging takes everything along.

Every rule is a function of source text or of paths, so that a planted violation can be given to it; each has one.
"""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement
from setuptools import find_namespace_packages

from bebop.decoding import SYSTEMS

ROOT = Path(__file__).resolve().parents[1]
LINKS = ("rollout", "trainer", "kernels", "conf")  # bebop/<name> -> ../<name>
# bebop/<value> -> ../<key>, for the wheel
LENT = {"recipes/verl": "verl_job", "recipes/megatron": "megatron_job", "benchmarks": "bench"}
BARE = ("rollout", "trainer", "kernels", *LENT)  # folders that must not become packages of their own

# A module may import its own floor or lower. The longest matching prefix decides; a module without one is a mistake.
FLOORS = {
    # 0: what flows, and what needs nothing but numbers
    "bebop.kernels": 0,
    "bebop.trajectory": 0,
    "bebop.config": 0,
    "bebop.decoding": 0,
    "bebop.metrics": 0,
    "bebop.sinks": 0,
    "bebop.errors": 0,
    "bebop.command": 0,
    "bebop.store": 0,
    "bebop.resume_rules": 0,
    "bebop.run_folder": 0,
    "bebop.override_merge": 0,
    "bebop.intervals": 0,
    "bebop.adaptation.config": 0,
    "bebop.config_sglang": 0,
    "bebop.conf": 0,
    # 1: parts that know no engine, no worker and no trainer
    "bebop.model": 1,
    "bebop.identity": 1,
    "bebop.tasks": 1,
    "bebop.rollout.engine": 1,
    "bebop.rollout.slots": 1,
    "bebop.rollout.decoding": 1,
    "bebop.trainer.advantages": 1,
    "bebop.trainer.chains": 1,
    "bebop.trainer.logprobs": 1,
    "bebop.trainer.losses": 1,
    "bebop.trainer.packing": 1,
    "bebop.trainer.schedule": 1,
    # 2: engines, workers, trainers, the buffer and the monitor
    "bebop.buffer": 2,
    "bebop.protocols": 2,
    "bebop.weights": 2,
    "bebop.monitor": 2,
    "bebop.rollout": 2,
    "bebop.rollout.decoding.draft_verify": 2,
    "bebop.rollout.decoding.registry": 2,
    "bebop.trainer": 2,
    # 3, 4: what joins them, without Ray and with it
    "bebop.clock": 3,
    "bebop.pool": 3,
    "bebop.loop": 3,
    "bebop.runtime": 4,
    "bebop.adaptation": 4,
    "bebop.remote": 4,
    "bebop.placement": 4,
    "bebop.report": 4,
    "bebop.dashboards": 2,
    "bebop.preflight": 4,
    # 5: entry points
    "bebop.compose": 5,
    "bebop.report.__main__": 5,
    "bebop.run": 5,
    "bebop.bench": 5,
    "bebop.adapt": 5,
    "bebop.certify": 5,
    "bebop.verl_job": 5,
    "bebop.megatron_job": 5,
    "recipes": 5,
}
# Heavy libraries have a door: the only modules that may import them. A trailing _ matches the start of a file's name.
DOORS = {
    "ray": ("bebop.runtime", "bebop.placement", "bebop.remote", "bebop.verl_job"),
    "hydra": ("bebop.compose",),
    "omegaconf": ("bebop.compose",),
    "sglang": ("bebop.rollout.sglang_",),
    "verl": ("bebop.verl_job",),
    "megatron": ("bebop.megatron_job", "bebop.verl_job.megatron_"),
    "plotly": ("bebop.report", "bebop.bench.record"),
    "wandb": ("bebop.sinks",),
}
# Names that would hide a library when a script is run from its own folder.
LIBRARIES = "torch triton transformers tokenizers safetensors numpy yaml tqdm tensorboard datasets vllm pytest"
TAKEN = {*sys.stdlib_module_names, *DOORS, *LIBRARIES.split()}
SKIPPED = (".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "runs", "build", "dist", "outputs")
MACHINE_PATH = re.compile(r"(?<![\w.}/])/(?:work|tmp|home|root|opt|mnt|Users)/\w+")


# ---- what is there


def files(root: Path = ROOT) -> Iterator[Path]:
    """Every file of the project once, relative to ``root``: not through links, no caches, no run folders."""
    for path in sorted(root.iterdir()):
        if path.is_symlink() or any(fnmatch(path.name, pattern) for pattern in SKIPPED):
            continue
        if path.is_dir():
            yield from (path.relative_to(root) / inner for inner in files(path))
        else:
            yield path.relative_to(root)


def lent(path: Path) -> Path | None:
    """Where a file of a lent folder stands in the wheel: recipes/verl/plugin.py -> bebop/verl_job/plugin.py."""
    folders = (Path(key) for key in LENT if path.is_relative_to(key))
    return next((Path("bebop", LENT[str(f)], path.relative_to(f)) for f in folders), None)


def module_name(path: Path) -> str:
    """rollout/decoding/distributions.py -> bebop.rollout.decoding.sampling; recipes/verl/plugin.py ->
    bebop.verl_job.plugin."""
    if (place := lent(path)) is not None:
        return ".".join([*place.parts[:-1], place.stem])
    parts = [*path.parts[:-1], *([] if path.stem == "__init__" else [path.stem])]
    return ".".join(["bebop", *parts] if parts[0] in LINKS else parts)


def sources() -> dict[str, str]:
    """Module name -> source, for everything but the tests."""
    mine = ("bebop", "recipes", *LINKS)
    return {module_name(f): (ROOT / f).read_text() for f in files() if f.suffix == ".py" and f.parts[0] in mine}


def imports(source: str, modules: Sequence[str]) -> list[str]:
    """Every import in a source, wherever it stands; ``from a import b`` is a.b where that is one of ``modules``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            full = [f"{start}.{alias.name}" for alias in node.names]
            found += [name if name in modules else start for name in full]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            found += [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return found


def under(module: str, prefix: str) -> bool:
    """Whether ``module`` is ``prefix`` or inside it."""
    return module == prefix or module.startswith(prefix if prefix.endswith("_") else prefix + ".")


# ---- the rules


def floor(module: str) -> int | None:
    """The floor of a module; None if it has none."""
    if module == "bebop":
        return 0
    matching = [prefix for prefix in FLOORS if under(module, prefix)]
    return FLOORS[max(matching, key=len)] if matching else None


def floor_violations(module: str, source: str, modules: Sequence[str]) -> list[str]:
    """Imports of a higher floor, and a module without a floor."""
    own = floor(module)
    if own is None:
        return [f"{module} has no floor: add it to FLOORS"]
    targets = [t for t in imports(source, modules) if under(t, "bebop") or under(t, "recipes")]
    return [
        f"{module} (floor {own}) imports {t} (floor {height})"
        for t in targets
        if (height := floor(t)) is None or height > own
    ]


def side_violations(module: str, source: str, modules: Sequence[str]) -> list[str]:
    """rollout and trainer never import each other."""
    sides = {"bebop.rollout": "bebop.trainer", "bebop.trainer": "bebop.rollout"}
    other = next((o for side, o in sides.items() if under(module, side)), None)
    return [f"{module} imports {t}" for t in imports(source, modules) if other is not None and under(t, other)]


def door_violations(module: str, source: str, modules: Sequence[str]) -> list[str]:
    """Heavy libraries are imported behind their door only."""
    tops = [t.split(".")[0] for t in imports(source, modules)]
    closed = [top for top in tops if top in DOORS and not any(under(module, door) for door in DOORS[top])]
    return [f"{module} imports {top}: only {' and '.join(DOORS[top])} may" for top in closed]


def form_violations(module: str, source: str, modules: Sequence[str]) -> list[str]:
    """Imports are absolute and name the package: ``bebop.rollout``, neither ``rollout`` nor ``.rollout``."""
    return [f"{module} imports {t}" for t in imports(source, modules) if t.startswith(".") or t.split(".")[0] in LINKS]


def system_violations(module: str, source: str, modules: Sequence[str]) -> list[str]:
    """Decoding systems are asked for their properties: no comparison with the name of one outside the registry.

    "bebop" is an engine of verl, too; nothing else may be compared with it.
    """
    compared = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)]
    sides = [s for c in compared if "rollout.name" not in ast.unparse(c) for s in (c.left, *c.comparators)]
    single = [e for side in sides for e in (side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side])]
    names = {str(one.value) for one in single if isinstance(one, ast.Constant)} & set(SYSTEMS)
    return [f"{module} compares with {name}" for name in sorted(names)]


def part_violations(module: str, source: str, modules: Sequence[str]) -> list[str]:
    """Drafters, rules and lengths know the seams, the model and the kernels: no engine, no target, no other part."""
    if not any(under(module, f"bebop.rollout.decoding.{kind}") for kind in ("drafters", "rules", "lengths")):
        return []
    decoding = "bebop.rollout.decoding"
    known = (f"{decoding}.base", f"{decoding}.sampling", "bebop.rollout.slots", "bebop.model", "bebop.kernels")
    known += ("bebop.config", "bebop.errors")
    ours = [t for t in imports(source, modules) if under(t, "bebop")]
    return [f"{module} imports {t}" for t in ours if not any(under(t, prefix) for prefix in known)]


SOURCE_RULES = (
    floor_violations, side_violations, door_violations, form_violations, system_violations, part_violations
)  # fmt: skip


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


@pytest.mark.parametrize("rule", SOURCE_RULES, ids=lambda rule: rule.__name__)
def test_sources_keep(rule) -> None:
    tree = sources()
    assert [found for module, source in tree.items() for found in rule(module, source, tree)] == []


def test_the_checks_see_the_tree() -> None:
    tree = sources()
    assert {"bebop.runtime", "bebop.rollout.worker", "bebop.trainer.losses", "bebop.kernels.verify"} <= set(tree)
    assert "bebop.trainer.checkpoint" in imports(tree["bebop.runtime"], tree)


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
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert pin_violations(wanted, (ROOT / "constraints.txt").read_text().splitlines()) == []


def settings() -> dict:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


# ---- planted violations


MODULES = ("bebop.loop", "bebop.runtime", "bebop.rollout.worker", "bebop.trainer.policy", "bebop.rollout.engine")
PLANTED = [
    (floor_violations, "bebop.kernels.verify", "from bebop.model.backbone import Policy"),
    (floor_violations, "bebop.buffer", "from bebop import loop"),
    (floor_violations, "bebop.loop", "def f():\n    import bebop.runtime"),
    (floor_violations, "bebop.rollout.decoding.sampling", "from bebop.rollout.decoding.registry import make_part"),
    (floor_violations, "bebop.rollout.engine", "import importlib\nimportlib.import_module('bebop.rollout.worker')"),
    (floor_violations, "bebop.trainer.rank", "from recipes.tiny.data import examples"),
    (floor_violations, "bebop.somewhere", ""),
    (side_violations, "bebop.trainer.policy", "from bebop.rollout.engine import Request"),
    (side_violations, "bebop.rollout.worker", "from bebop.trainer import policy"),
    (door_violations, "bebop.loop", "import ray"),
    (door_violations, "bebop.config", "from omegaconf import DictConfig"),
    (door_violations, "bebop.rollout.torch_engine", "import sglang.srt"),
    (door_violations, "bebop.rollout.worker", "def f():\n    from wandb import init"),
    (form_violations, "bebop.loop", "from rollout.worker import RolloutWorker"),
    (form_violations, "bebop.loop", "import kernels"),
    (form_violations, "bebop.loop", "from . import buffer"),
    (system_violations, "bebop.loop", "if config.decoding.system == 'target_only': pass"),
    (system_violations, "bebop.monitor.watch", "fixed = system in ('autoregressive', other)"),
    (part_violations, "bebop.rollout.decoding.drafters.mtp", "from bebop.rollout.target import Target"),
    (
        part_violations,
        "bebop.rollout.decoding.rules.block",
        "from bebop.rollout.decoding.rules.rejection import Rejection",
    ),
]


@pytest.mark.parametrize(("rule", "module", "source"), PLANTED)
def test_planted_imports_are_caught(rule, module: str, source: str) -> None:
    assert len(rule(module, source, MODULES)) == 1


@pytest.mark.parametrize(
    ("rule", "module", "source"),
    [
        (floor_violations, "bebop.runtime", "from bebop.loop import Loop"),
        (floor_violations, "bebop.rollout.decoding.draft_verify", "from bebop.rollout.target import Target"),
        (side_violations, "bebop.runtime", "from bebop.rollout import worker\nfrom bebop.trainer import policy"),
        (door_violations, "bebop.rollout.sglang_engine", "import sglang"),
        (door_violations, "bebop.runtime", "import ray.util"),
        (system_violations, "bebop.loop", "near = sums['target_only'] > 1\nif rollout.name == 'bebop': pass"),
        (part_violations, "bebop.rollout.decoding.rules.block", "from bebop.rollout.decoding.base import Draft"),
        (form_violations, "bebop.loop", "import trainers\nfrom bebop.rollout.worker import RolloutWorker"),
    ],
)
def test_what_is_allowed_passes(rule, module: str, source: str) -> None:
    assert rule(module, source, MODULES) == []


def test_planted_files_are_caught(tmp_path: Path) -> None:
    assert init_violations(
        [Path("kernels/__init__.py"), Path("rollout/decoding/__init__.py"), Path("conf/__init__.py")]
    ) == [
        "kernels/__init__.py",
        "rollout/decoding/__init__.py",
    ]
    names = [Path("bebop/types.py"), Path("rollout/queue.py"), Path("kernels/triton.py"), Path("bebop/buffer.py")]
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
