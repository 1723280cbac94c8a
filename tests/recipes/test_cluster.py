"""Cluster recipes: they compose, fit and predict; the roofline is held against arithmetic done by hand."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import yaml

from bebop import run
from bebop.config.compose import job_config
from bebop.config.simulate import CompletionsConfig
from bebop.errors import UserError
from bebop.simulation.parts import SimulatedBatch
from bebop.simulation.roofline import GPUS, MODELS
from bebop.verl_job.run import choices
from recipes.cluster import __main__ as command
from recipes.cluster.prediction import STORED, predict, speedup, waiting
from recipes.cluster.recipe import FOLDER, Recipe, load, names
from recipes.cluster.roofline import Lengths, Plan, Roofline
from recipes.cluster.start import arguments, verl_overrides
from tests.cases import slow_but
from tests.commands import error_of

SMALL = "8-gpus-8b-short"
SIZES = {8, 64, 512}


@pytest.fixture(scope="module")
def recipes() -> list[Recipe]:
    return [load(name) for name in names()]


def variant(folder: Path, name: str, *changes: tuple[str, str]) -> str:
    """A recipe's file with parts of its text replaced, in ``folder``; its name."""
    text = (FOLDER / f"{name}.yaml").read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / f"{name}.yaml").write_text(text)
    return name


def refusal(folder: Path, name: str, *changes: tuple[str, str]) -> str:
    with pytest.raises(UserError) as refused:
        load(variant(folder, name, *changes), folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# ---- what there is


@pytest.mark.slow
def test_there_are_8_64_and_512_gpus_two_sizes_of_model_and_both_lengths(recipes: list[Recipe]) -> None:
    assert {recipe.gpus for recipe in recipes} == SIZES
    assert {recipe.file.model for recipe in recipes} == set(MODELS)
    lengths = {recipe.job.rollout.max_length for recipe in recipes}
    assert max(lengths) == 1 << 17 and {67584} <= lengths
    assert all(str(recipe.gpus) == recipe.name.split("-")[0] for recipe in recipes)


@pytest.mark.slow
def test_each_starts_what_it_was_sized_for(recipes: list[Recipe]) -> None:
    for recipe in recipes:
        given = arguments(recipe)
        if recipe.file.trainer == "own":
            job = job_config([*given, "model.path=tiny"])
            assert job.runtime.address == "auto"
            assert dataclasses.replace(job, runtime=recipe.job.runtime) == recipe.job
        else:
            assert given[:2] == ["runtime=verl", f"bebop={recipe.file.group}"] and recipe.file.group in choices()
            shown = dict(override.lstrip("+").split("=", 1) for override in verl_overrides(recipe))
            split = int(shown["actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"])
            tokens = int(shown["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"]) * split
            assert tokens >= recipe.job.rollout.max_length  # one completion of full length fits a micro-batch


# ---- the roofline, by hand


def test_models_have_the_parameters_that_are_published() -> None:
    small, large = MODELS["mimo-7b"], MODELS["qwen2.5-72b"]
    assert small.parameters + small.head == pytest.approx(7.83e9, rel=5e-3)
    assert large.parameters == pytest.approx(72.7e9, rel=5e-3)


def by_hand(**changes: object) -> Roofline:
    plan = Plan(
        tensor_parallel=1, slots=64, trainer_gpus=4, sequence_parallel=1, recompute=False, micro_batch=7168,
        by_network=False, one_machine=True,
    )  # fmt: skip
    lengths = Lengths(mean=2000.0, weighted=3000.0, prompt=500.0, longest=7168)
    return Roofline(GPUS["h100"], MODELS["mimo-7b"], dataclasses.replace(plan, **changes), lengths)  # type: ignore[arg-type]


def test_a_pass_over_one_row_reads_weights_and_its_keys_and_values() -> None:
    weights = 36 * (4096 * 128 * 2 * (32 + 8) + 3 * 4096 * 11008) + 151680 * 4096  # without the embedding
    cached = 36 * 2 * 8 * 128 * 2 * (500 + 3000 / 2)  # bytes of a row's keys and values
    assert by_hand().target(1, 1) == pytest.approx(5e-4 + (2 * weights + cached) / (3.35e12 * 0.8), rel=1e-12)


def test_many_positions_are_bound_by_products() -> None:
    weights = MODELS["mimo-7b"].multiplied
    products = 64 * 17 * (2 * weights + 36 * 4 * 32 * 128 * 2000)
    assert by_hand().target(64, 17) == pytest.approx(5e-4 + products / (989e12 * 0.67), rel=1e-12)


def test_tensor_parallelism_divides_work_and_pays_for_all_reduces() -> None:
    alone, eight = by_hand().target(1, 1), by_hand(tensor_parallel=8).target(1, 1)
    sent = 2 * 36 * (1e-5 + 4096 * 2 * 2 * 7 / 8 / (450e9 * 0.5))
    assert eight == pytest.approx(5e-4 + (alone - 5e-4) / 8 + sent, rel=1e-12)


def test_training_is_three_forward_passes_and_four_with_recomputation() -> None:
    forward = 2 * MODELS["mimo-7b"].multiplied + 36 * 4 * 32 * 128 * 3500 / 2
    assert by_hand().update_token() == pytest.approx(3 * forward / (4 * 989e12 * 0.35), rel=1e-12)
    assert by_hand(recompute=True).update_token() == pytest.approx(4 / 3 * by_hand().update_token(), rel=1e-12)


def test_memory_by_hand() -> None:
    model = MODELS["mimo-7b"]
    cached = 37 * 2 * 8 * 128 * 2 * 64 * 2000  # the head caches, too
    assert by_hand().engine_bytes() == pytest.approx(2 * (model.parameters + model.head) + cached, rel=1e-12)
    kept = 16 * model.parameters / 4 + 8 * 151680 * 4096 + 34 * 36 * 4096 * 7168
    assert by_hand().trainer_bytes() == pytest.approx(kept, rel=1e-12)


@pytest.mark.parametrize("drafts", [0, 3, 8])
def test_the_line_through_one_row_and_all_slots_meets_the_roofline_there(drafts: int) -> None:
    roofline = by_hand()
    costs = roofline.costs(drafts)
    whole = costs.cycle + 63 * costs.row + 64 * drafts * costs.position
    assert whole == pytest.approx(roofline.target(64, drafts + 1), rel=1e-12)
    assert costs.draft + 63 * costs.draft_row == pytest.approx(roofline.draft(64), rel=1e-12)
    assert all(costs.cycle + (n - 1) * costs.row >= roofline.target(n, 1) * (1 - 1e-12) for n in range(1, 65))


def test_moments_of_lengths_are_those_of_a_log_normal() -> None:
    free = Lengths.of(CompletionsConfig(median=1000, sigma=0.5, longest=1 << 20, prompt=100))
    assert free.mean == pytest.approx(1000 * math.exp(0.125), rel=2e-3)
    assert free.weighted == pytest.approx(1000 * math.exp(0.375), rel=5e-3)
    cut = Lengths.of(CompletionsConfig(median=1000, sigma=0.5, longest=1000, prompt=100))
    assert cut.weighted < 1000 and cut.context == 100 + cut.weighted / 2


def test_the_context_is_that_of_rows_as_they_run() -> None:
    """Rows of known lengths in the simulator's own batch: long ones are met more often than they are asked for."""
    batch, lengths, seen = SimulatedBatch(4, lambda rows: 1.0), [100, 300], []
    for key in range(400):
        batch.add(key, lengths[key % 2], 0.0)
    started = {}
    for now in range(1000, 9000, 7):
        batch.advance(float(now))
        for _, _, row in batch._rows:
            started[row.key] = row.started
            seen.append(batch._cycles - row.started)
    weighted = (100**2 + 300**2) / (100 + 300)
    assert sum(seen) / len(seen) == pytest.approx(weighted / 2, rel=0.05)
    assert abs(sum(lengths) / 2 / 2 / (weighted / 2) - 1) > 0.1  # half the mean length would be another number


def test_the_gain_of_drafts_by_hand() -> None:
    recipe = load(SMALL)
    roofline = recipe.roofline
    assert recipe.simulation.completions.accept_rates == (0.8, 0.7, 0.6)
    tokens = 1 + 0.8 + 0.8 * 0.7 + 0.8 * 0.7 * 0.6
    seconds = roofline.target(64, 4) + 3 * roofline.draft(64)
    assert speedup(recipe) == pytest.approx(tokens * roofline.target(64, 1) / seconds, rel=1e-9)


# ---- what does not fit is refused


@pytest.mark.slow
def test_the_own_trainer_recomputes_where_it_would_in_a_job(recipes: list[Recipe]) -> None:
    [own] = [one for one in recipes if one.name == "8-gpus-8b-short"]
    assert own.roofline.plan.recompute, "activations of 7,168 tokens take more than an eighth of the memory"
    assert all(one.roofline.plan.recompute for one in recipes)


def test_long_completions_do_not_fit_the_own_trainer(tmp_path: Path) -> None:
    longer = [("max_length=7168", "max_length=67584"), ("max_new_tokens=6144", "max_new_tokens=65536")]
    line = refusal(tmp_path, SMALL, *longer, ("slots=64", "slots=16"))
    assert line.startswith(f"recipe {SMALL}: the trainer takes 81 GB") and "have 72 GB to give" in line


@pytest.mark.slow
def test_slots_that_keys_and_values_have_no_room_for(tmp_path: Path) -> None:
    line = refusal(tmp_path, "64-gpus-70b-reasoning", ("slots=96", "slots=200"))
    assert "an engine takes" in line


# Refused before a job is composed, which takes a third of a second; and after it.
IN_THE_FILE = [
    (SMALL, [("prompt_tokens: 1024", "sequence_parallel: 2")], "sequence_parallel=2 is not possible: bebop's"),
    (SMALL, [("gpu: h100", "gpu: h7")], "gpu='h7' is not possible: choose one of h100"),
    (SMALL, [("model: mimo-7b", "model: m")], "model='m' is not possible: choose one of mimo-7b"),
    (SMALL, [("trainer: own", "trainer: ben")], "trainer='ben' is not possible: choose one of own, verl"),
    (SMALL, [("about:", "abut:")], "abut="),
    (SMALL, [("about:", "a: b:")], "no YAML"),
]
IN_THE_JOB = [
    (SMALL, [("workers=4", "workers=5")], "engines and trainer take 9 GPUs, the machines have 8"),
    (SMALL, [("machines: 1", "machines: 4"), ("ranks=4", "ranks=28")],
     "trainer.ranks=28 is not possible: ranks of bebop's own trainer lie on one machine"),
    ("64-gpus-8b-reasoning", [("ranks=16", "ranks=12"), ("workers=48", "workers=52")],
     "verl's trainer takes whole machines"),
    ("8-gpus-8b-reasoning", [("sequence_parallel: 4", "sequence_parallel: 3")], "it must divide trainer.ranks"),
    (SMALL, [("prompt_tokens: 1024", "prompt_tokens: 1025")], "leaves 1024 tokens for a prompt"),
    (SMALL, [("fleet: {", "fleet: {workers: 9, ")], "simulate.fleet.workers is not possible: it follows from job"),
    (SMALL, [("  grain: 16", "  costs: {}")], "simulate.costs is not possible"),
    (SMALL, [("grain: 16", "grain: 0")], "grain=0 is not possible"),
    (SMALL, [("slots=64", "slots=no")], "rollout.slots='no' is not possible"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    slow_but([*IN_THE_FILE, IN_THE_JOB[0]], [*IN_THE_FILE, *IN_THE_JOB], several=True),
)
def test_mistakes_in_a_recipe_are_one_line(
    tmp_path: Path, name: str, changes: list[tuple[str, str]], word: str
) -> None:
    line = refusal(tmp_path, name, *changes)
    assert line.startswith(f"recipe {name}: ") and word in line, line


def test_a_file_that_is_no_mapping(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match="recipe a: a mapping is wanted"):
        load("a", tmp_path)


# ---- the command


@pytest.mark.slow
def test_the_list_has_each_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == names()


def test_a_prediction_says_that_it_is_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "predict", lambda recipe: stored()[recipe.name])  # the simulation takes seconds
    assert command.main([SMALL, "--predict"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("PREDICTIONS, not measured") and any("trajectories/s" in line for line in rest)


def test_it_starts_the_job_with_what_its_user_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(run, "main", lambda given: started.append(given) or 0)
    assert command.main([SMALL, "model.path=tiny", "trainer.steps=5"]) == 0
    job = job_config(started[0])
    assert job.trainer.steps == 5 and job.runtime.address == "auto" and job.model.path == "tiny"


ARGUMENTS = [
    (["nope"], "'nope' is no recipe; there are 8-gpus-8b-reasoning"),
    (["../x"], "'../x' is no recipe"),
    (["--predict"], "--predict wants the name of a recipe"),
    (["--show"], "--show wants the name of a recipe"),
    ([SMALL, "--store"], "--store takes no recipe"),
    ([SMALL, "--nonsense"], "unrecognized arguments: --nonsense"),
]
OF_A_RECIPE = [
    ([SMALL], f"{SMALL} needs model.path=DIR"),
    ([SMALL, "a=1", "--predict"], "--predict is of the recipe as it stands: 'a=1'"),
    ([SMALL, "--predict", "--show"], "'--show' is not wanted"),
    ([SMALL, "nonsense"], "'nonsense' is no setting"),
    (["8-gpus-8b-reasoning", "model.path=x"], "needs actor_rollout_ref.model.path=DIR"),
    ([SMALL, "model.path=tiny", "trainer.steps=0"], "trainer.steps=0 is not possible"),
]


@pytest.mark.parametrize(("given", "word"), slow_but(ARGUMENTS, [*ARGUMENTS, *OF_A_RECIPE], several=True))
def test_mistakes_are_one_line(given: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert word in error_of(command.main, given, capsys)


# ---- what is stored


def agrees(stored: dict[str, float], now: dict[str, float]) -> bool:
    """The same numbers but for rounding: the simulation draws nothing at random beside its seed."""
    return stored.keys() == now.keys() and all(math.isclose(stored[k], now[k], rel_tol=1e-3, abs_tol=1e-3) for k in now)


def stored() -> dict[str, dict[str, float]]:
    return json.loads(STORED.read_text())["recipes"]


def test_predictions_are_stored_for_all() -> None:
    assert list(stored()) == names() and "not measured" in json.loads(STORED.read_text())["kind"]


@pytest.mark.slow
def test_a_stored_prediction_is_what_is_predicted() -> None:
    now = predict(load(SMALL))
    assert agrees(stored()[SMALL], now), "python -m recipes.cluster --store"
    assert not agrees({**stored()[SMALL], "step_seconds": now["step_seconds"] * 1.01}, now)


@pytest.mark.exhaustive("simulates nine clusters; one of them is a slow test")
@pytest.mark.parametrize("name", [name for name in names() if name != SMALL])
def test_all_stored_predictions_are_what_is_predicted(name: str) -> None:
    assert agrees(stored()[name], predict(load(name))), "python -m recipes.cluster --store"


def test_files_are_mappings_without_what_is_derived() -> None:
    for name in names():
        assert "costs" not in yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["simulate"]


@pytest.mark.slow
def test_what_environments_add_by_hand(tmp_path: Path) -> None:
    """At no wait an engine has its rows open and nothing waits; what more waits takes its contexts in memory."""
    agents = "512-gpus-8b-agents"
    busy = waiting(load(variant(tmp_path, agents, ("environment_seconds: 2.0", "environment_seconds: 0.0")), tmp_path))
    assert busy == {"waiting_seconds": 0.0, "open_trajectories": 24.0, "waiting_gb": 0.0}
    recipe = load(agents)
    found, lengths = waiting(recipe), recipe.roofline.lengths
    assert found["waiting_seconds"] == 200 * 2.0
    # 37 layers of 8 heads of 128 numbers, keys and values, two bytes; half of it on each of two GPUs.
    each = 37 * 8 * 128 * 2 * 2 * lengths.context / 2 / 1e9
    assert found["waiting_gb"] == pytest.approx((found["open_trajectories"] - 24) * each)
    longer = waiting(
        load(variant(tmp_path, agents, ("environment_seconds: 2.0", "environment_seconds: 4.0")), tmp_path)
    )
    assert longer["open_trajectories"] - 24 == pytest.approx(2 * (found["open_trajectories"] - 24))
    assert waiting(load("64-gpus-8b-reasoning")) == {}
