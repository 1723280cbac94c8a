"""Files, names and links where packaging expects them, pins within their bounds, and the wheel itself.

Every rule is a function of paths or of text, so that a planted violation can be given to it; each has one.
"""

import os
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
    "sglang vllm verl megatron plotly wandb trackio verifiers renderers peft"
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


def build(folder: Path) -> Path:
    """The wheel, built from a copy of the sources: a build leaves folders behind."""
    source = folder / "source"
    copytree(ROOT, source, symlinks=True, ignore=ignore_patterns(*SKIPPED))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(folder)]
    subprocess.run([*command, str(source)], check=True, stdin=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


def environment(folder: Path, *installed: str) -> Path:
    """The bin/ of a new environment with ``installed`` and, by a path, the libraries of this one, but not its Bebop."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "libraries.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    options = ["-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "install", *options, *installed], check=True, stdin=subprocess.DEVNULL)
    return python.parent


def alone(**changed: str) -> dict[str, str]:
    """The environment variables without those by which this checkout would be found."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")} | changed


@pytest.mark.slow
def test_wheel_holds_everything(tmp_path: Path) -> None:
    with zipfile.ZipFile(build(tmp_path)) as wheel:
        names = wheel.namelist()
        about = {name.rpartition("/")[2]: wheel.read(name).decode() for name in names if ".dist-info/" in name}
    held = {name for name in names if name.startswith("bebop/")}
    assert held == {name for p in files() if (name := shipped(p))}
    assert [name for name in names if name not in held and ".dist-info/" not in name] == []
    for folder in ("bebop/rollout", "bebop/trainer", "bebop/kernels", "bebop/conf/rollout", "bebop/model/tiny"):
        assert any(name.startswith(f"{folder}/") for name in held), folder
    assert {"bebop/py.typed", "bebop/view/page/index.html", "bebop/report/page.html.jinja"} <= held
    assert "[console_scripts]\nbebop = bebop.cli:entry\n" in about["entry_points.txt"]
    for line in ("License-Expression: Apache-2.0", "Author: The Bebop authors", "Classifier: Typing :: Typed"):
        assert f"\n{line}\n" in about["METADATA"], line


USER = "from bebop.kernels.verify import sample\nfrom bebop.trajectory import SamplingParams\n"
USER += "limit: str = SamplingParams(max_new_tokens=3).max_new_tokens\nreveal_type(sample)\n"


@pytest.mark.exhaustive("mypy reads torch from the beginning: a minute")
def test_a_type_checker_sees_an_editable_install(tmp_path: Path) -> None:
    source = tmp_path / "source"
    copytree(ROOT, source, symlinks=True, ignore=ignore_patterns(*SKIPPED))
    python = environment(tmp_path / "clean", "-e", str(source)) / "python"
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "job.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--python-executable", str(python), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, "job.py"], cwd=tmp_path / "user", env=alone(), text=True, capture_output=True, check=False
    )
    assert 'has type "int", variable has type "str"' in done.stdout and "import-not-found" not in done.stdout
    assert 'Revealed type is "def (probs: torch._tensor.Tensor' in done.stdout, done.stdout


# ---- the image

DOCKERFILE = ROOT / "recipes/docker/Dockerfile"


def stages(text: str) -> dict[str, list[str]]:
    """Stage -> its instructions, those of the stage that it begins from included; comments are left out."""
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    found, name = dict[str, list[str]](), ""
    for line in filter(None, map(str.strip, lines)):
        if begins := re.match(r"FROM (\S+) AS (\S+)", line):
            name = begins[2]
            found[name] = list(found.get(begins[1], []))
        elif name:
            found[name].append(line)
    return found


def test_the_dockerfile_has_both_variants_at_the_versions_that_are_pinned() -> None:
    found = stages(DOCKERFILE.read_text().replace("${VARIANT}", "cpu"))
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    for variant in ("torch-cpu", "torch-cuda"):
        assert sum(f"pip install --no-cache-dir {torch} " in f"{line} " for line in found[variant]) == 1, variant
    copied = {line.split()[1] for line in found["final"] if line.startswith("COPY")}
    assert copied == {"."} and 'ENTRYPOINT ["bebop"]' in found["final"]
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert {*SKIPPED} <= {pattern.removeprefix("**/") for pattern in ignored}


@pytest.mark.slow
def test_hadolint_finds_nothing_in_the_dockerfile_and_something_in_a_worse_one() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    subprocess.run([hadolint, str(DOCKERFILE)], check=True)
    worse = DOCKERFILE.read_text().replace(" --no-cache-dir", "").replace("WORKDIR /bebop", "RUN cd bebop")
    done = subprocess.run([hadolint, "-"], input=worse, text=True, capture_output=True, check=False)
    assert done.returncode == 1 and "DL3042" in done.stdout and "DL3003" in done.stdout


@pytest.mark.exhaustive("installs torch and all dependencies anew: minutes, and gigabytes on the disk")
def test_the_steps_of_the_cpu_image_work(tmp_path: Path) -> None:
    """Without Docker: RUN steps in a copy of the sources, with the pip of a new environment. apt-get is left out."""
    copytree(ROOT, tmp_path / "bebop", symlinks=True, ignore=ignore_patterns(*SKIPPED))
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "clean")], check=True)
    bin = tmp_path / "clean" / "bin"
    told = alone(PATH=f"{bin}{os.pathsep}{os.environ['PATH']}", TORCH_INDEX="", VIRTUAL_ENV=str(tmp_path / "clean"))
    steps = stages(DOCKERFILE.read_text().replace("${VARIANT}", "cpu"))["final"]
    steps = [step.removeprefix("RUN ") for step in steps if step.startswith("RUN ") and "apt-get" not in step]
    assert len(steps) == 2
    for step in steps:
        subprocess.run(["sh", "-ec", step], cwd=tmp_path / "bebop", env=told, check=True, stdin=subprocess.DEVNULL)
    told["HOME"] = str(tmp_path / "bebop" / "home")
    done = subprocess.run(
        [bin / "bebop", "demo"], cwd=tmp_path / "bebop", env=told, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0 and "\nFail: " in done.stdout, done.stdout + done.stderr
