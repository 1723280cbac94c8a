"""Who may import whom, what may be named where, and how long files and functions are.

Every rule is a function of source text, so that a planted violation can be given to it: ``test_layout_planted.py``.
``test_packaging.py`` has the rules about files, names and the wheel.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from bebop.decoding import SYSTEMS
from tests.tree import LINKS, ROOT, files, imports, parsed, sources, under

# A module may import its own floor or lower. The longest matching prefix decides; a module without one is a mistake.
# bebop. is left out, but for what stands beside it; a command is on the highest floor, wherever it stands.
TABLE = {
    # what flows, and what needs nothing but numbers
    0: "kernels codec token_trace trajectory config config_ decoding metrics sinks errors command store origin "
    "processes events resume_rules run_folder override_merge intervals parsing reading options catalogue "
    "catalogue_turns tree_shape conf",
    # parts that know no engine, no worker and no trainer
    1: "model identity tasks rollout.engine rollout.slots rollout.history rollout.decoding trainer.advantages "
    "trainer.chains trainer.logprobs trainer.losses trainer.optim trainer.packing trainer.schedule trainer.scorer "
    "trainer.block_loss trainer.block_choice trainer.firp_loss trainer.firp_ranks trainer.pipo_rows trainer.pipo_loss "
    "certify.answers certify.two_sample certify.evidence certify.directions certify.bets certify.bigram "
    "certify.cohort certify.marginals certify.tilt certify.ledger certify.causes certify.columns certify.structure "
    "certify.declared certify.family certify.checkpoint certify.white_box",
    # engines, workers, trainers, the buffer and the monitor
    2: "buffer trajectories trajectory_log trajectory_rows trajectory_schema past_answers protocols weight_manifest "
    "hangs watchdog "
    "monitor dashboards rollout rollout.decoding.draft_verify rollout.decoding.registry trainer",
    # what joins them, without Ray and with it
    3: "clock dispatch lane pool loop",
    4: "runtime adaptation report view remote placement preflight certify simulation "
    "trainer.block trainer.block_length trainer.firp trainer.pipo",
    # entry points
    5: "compose trust settings run bench adapt export convert simulate verl_job megatron_job recipes",
}
BESIDE = ("recipes",)  # folders of modules beside bebop
FLOORS = {
    name if name in BESIDE else f"bebop.{name}": height for height, names in TABLE.items() for name in names.split()
}
HIGHEST = 5
# Heavy libraries have a door: the only modules that may import them.
DOORS = {
    "ray": ("bebop.runtime", "bebop.placement", "bebop.remote", "bebop.verl_job"),
    "hydra": ("bebop.compose",),
    "omegaconf": ("bebop.compose",),
    "sglang": ("bebop.rollout.sglang", "recipes.upstream.sglang_"),
    "vllm": ("bebop.rollout.vllm", "recipes.upstream.vllm_"),
    "verl": ("bebop.verl_job",),
    "megatron": ("bebop.megatron_job", "bebop.verl_job.megatron_"),
    "plotly": ("bebop.report", "bebop.view", "bebop.bench.record"),
    "wandb": ("bebop.sinks",),
    "verifiers": ("bebop.tasks.environments.verifiers_",),
    "renderers": ("bebop.tasks.environments.verifiers_",),
}
# Drafters, rules and lengths: what they are, and all of ours that they may know.
PARTS = tuple(f"bebop.rollout.decoding.{kind}" for kind in ("drafters", "rules", "lengths"))
SEAMS = ("bebop.rollout.decoding.base", "bebop.rollout.decoding.sampling", "bebop.rollout.decoding.head",
         "bebop.rollout.decoding.temperature", "bebop.rollout.decoding.pace", "bebop.rollout.decoding.recall",
         "bebop.rollout.decoding.trust", "bebop.rollout.decoding.unread", "bebop.rollout.decoding.timed_length",
         "bebop.rollout.decoding.cycle_seconds", "bebop.rollout.decoding.matching",
         "bebop.rollout.slots", "bebop.model",
         "bebop.kernels", "bebop.config", "bebop.options", "bebop.tree_shape", "bebop.errors")  # fmt: skip
# Where a rollout may know of the MTP head.
HEADED = ("bebop.rollout.decoding.drafters", "bebop.rollout.decoding.head", "bebop.rollout.decoding.unread",
          "bebop.rollout.served_weights",
          "bebop.rollout.sglang", "bebop.rollout.vllm")  # fmt: skip
NUMPY_ALONE = "bebop.monitor"  # so that whoever watches a job needs no torch
FILE, FUNCTION = 300, 60  # lines
# Longer all the same, and why; a line that is not needed any more is a failure.
LONG = {}


# ---- the rules


def floor(module: str) -> int | None:
    """The floor of a module; None if it has none."""
    if module == "bebop":
        return 0
    matching = [prefix for prefix in FLOORS if under(module, prefix)]
    if module.endswith(".__main__"):
        return HIGHEST
    return FLOORS[max(matching, key=len)] if matching else None


def floor_violations(module: str, source: str, modules: Sequence[str]) -> list[str]:
    """Imports of a higher floor, and a module without a floor."""
    own = floor(module)
    if own is None:
        return [f"{module} has no floor: add it to FLOORS"]
    targets = [t for t in imports(source, modules) if any(under(t, top) for top in ("bebop", *BESIDE))]
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
    compared = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Compare)]
    sides = [s for c in compared if "rollout.name" not in ast.unparse(c) for s in (c.left, *c.comparators)]
    single = [e for side in sides for e in (side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side])]
    names = {str(one.value) for one in single if isinstance(one, ast.Constant)} & set(SYSTEMS)
    return [f"{module} compares with {name}" for name in sorted(names)]


def part_violations(module: str, source: str, modules: Sequence[str]) -> list[str]:
    """Drafters, rules and lengths know the seams, the model and the kernels: no engine, no target, no other part."""
    if not any(under(module, part) for part in PARTS):
        return []
    ours = [t for t in imports(source, modules) if under(t, "bebop")]
    return [f"{module} imports {t}" for t in ours if not any(under(t, seam) for seam in SEAMS)]


def head_violations(module: str, source: str, modules: Sequence[str]) -> list[str]:
    """In a rollout, the MTP head is a drafter's matter, and SGLang's: no word of it elsewhere, in comments neither."""
    if not under(module, "bebop.rollout") or any(under(module, place) for place in HEADED):
        return []
    lines = enumerate(source.splitlines(), 1)
    return [f"{module}:{number} speaks of the MTP head" for number, line in lines if re.search("mtp", line, re.I)]


def numpy_violations(module: str, source: str, modules: Sequence[str]) -> list[str]:
    """The monitor imports numpy, Python's own and ours."""
    tops = {t.split(".")[0] for t in imports(source, modules)} if under(module, NUMPY_ALONE) else set()
    return [f"{module} imports {top}" for top in sorted(tops - {"bebop", "numpy", *sys.stdlib_module_names})]


SOURCE_RULES = (floor_violations, side_violations, door_violations, form_violations, system_violations, part_violations,
                head_violations, numpy_violations)  # fmt: skip


def stale(modules: Sequence[str]) -> list[str]:
    """Names in the tables above that no module has."""
    named = [*FLOORS, *(door for doors in DOORS.values() for door in doors), *PARTS, *SEAMS, *HEADED, NUMPY_ALONE]
    return sorted({name for name in named if not any(under(module, name) for module in modules)})


def length_violations(name: str, source: str) -> list[str]:
    """A file, and functions of it with their decorators, that are too long."""
    found = [f"{name}: {count} lines"] if (count := len(source.splitlines())) > FILE else []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if (count := (node.end_lineno or first) - first + 1) > FUNCTION:
                found.append(f"{name}:{node.name}: {count} lines")
    return found


def library_violations(modules: Sequence[str], library: str) -> list[str]:
    """``library``, if importing these modules brings it along, through whatever they import."""
    code = f"import {', '.join(modules)}, sys; sys.exit({library!r} in sys.modules)"
    return [library] if subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 1 else []


# ---- the tree keeps them


@pytest.mark.parametrize("rule", SOURCE_RULES, ids=lambda rule: rule.__name__)
def test_sources_keep(rule) -> None:
    tree = sources()
    assert [found for module, source in tree.items() for found in rule(module, source, tree)] == []


def test_the_rules_see_the_tree() -> None:
    tree = sources()
    assert {"bebop.runtime", "bebop.rollout.worker", "bebop.trainer.losses", "bebop.kernels.verify"} <= set(tree)
    assert "bebop.trainer.checkpoint" in imports(tree["bebop.runtime"], tree)
    assert stale(list(tree)) == []


def test_files_and_functions_are_short() -> None:
    texts = {str(path): (ROOT / path).read_text() for path in files() if path.suffix == ".py"}
    assert any(name.startswith("tests/") for name in texts) and "trainer/policy.py" in texts
    found = {name: long for name, text in texts.items() if (long := length_violations(name, text))}
    assert sorted(found) == sorted(LONG), found


def test_the_monitor_needs_no_torch() -> None:
    watching = [module for module in sources() if under(module, NUMPY_ALONE) and not module.endswith(".__main__")]
    assert library_violations(watching, "torch") == []
