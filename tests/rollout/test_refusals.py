"""Settings of decoding systems that are not possible: each is refused in one line that says why, and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bebop.config.compose import job_config
from bebop.config.engines import SglangConfig
from bebop.config.fields import from_dict
from bebop.config.job import DecodingConfig, JobConfig
from bebop.config.tree_shape import TreeOptions
from bebop.errors import UserError
from bebop.monitor.watch import JobMonitor, NullMonitor
from bebop.report.runs import Run
from bebop.report.verdict import NOTHING, said
from bebop.rollout.sglang import arguments as sglang
from bebop.rollout.torch_engine import TorchEngine
from bebop.rollout.vllm import arguments as vllm
from bebop.run import main
from bebop.runtime.job import _monitor
from bebop.systems import SYSTEMS
from bebop.verl_job.settings import parse_engine
from tests.builders import bare_policy
from tests.rollout.trees import FIVE

# ---- decoding

LENGTHS = r"draft_tokens='auto' is not possible: give a number with .*; auto is for .*bebop"
TEMPERATURES = r"draft_temperature='auto' is not possible: give a number or null with .*auto"
SHAPES = r"^decoding\.options\.shape=.* is not possible: give 1 to 64 paths, each after"
MISTAKES: dict[str, list[tuple[dict[str, Any], str]]] = {
    **{name: [({"draft_tokens": "auto", "most_drafts": 1}, LENGTHS)] for name in ("bebop_adaptive", "blockpilot")},
    **{name: [({"draft_temperature": "auto"}, TEMPERATURES)] for name in ("block", "firp")},
    "bebop": [({"draft_tokens": "auto", "most_drafts": most}, f"most_drafts={most}") for most in (0, 17)],
    "history": [
        ({"draft_tokens": "auto", "most_drafts": 17}, "most_drafts=17"),
        ({"options": {"tokens": 0}}, r"options\.tokens=0 is not possible: give"),
        ({"options": {"completions": 0}}, r"options\.completions=0 is not possible: give"),
        ({"options": {"siblings": 3}}, r"options\.siblings=3 is not possible: true or false"),
        ({"options": {"token": 3}}, r"options\.token"),
    ],
    "pipo": [
        ({"draft_tokens": "auto", "most_drafts": 1}, LENGTHS),
        ({"draft_tokens": 3}, "draft_tokens=3 is not possible: give 1 to 1"),
        ({"draft_tokens": 0}, "draft_tokens=0 is not possible: give 1 to 1"),
        ({"options": {"tau": float("inf")}}, r"options\.tau=inf is not possible: "),
        ({"options": {"keep": 1.5}}, r"options\.keep=1\.5 is not possible: give a number from 0 to 1"),
        ({"options": {"gate": "head"}}, r"options\.gate='head' is not possible"),
        ({"options": {"threshold": 0.5}}, "threshold"),
    ],
    "bebop_tree": [
        ({"draft_tokens": "auto", "most_drafts": 1}, LENGTHS),
        ({"draft_temperature": "auto"}, TEMPERATURES),
        *(
            ({"draft_tokens": 1, "options": {"shape": shape}}, SHAPES)
            for shape in (
                [], [[]], [[1]], [[0, 0]], [[0], [0]], [[0], [0, 1]], [[-1]], [[0], [0, -1]],
                [[0] * n for n in range(1, 66)],
            )
        ),
        ({"draft_tokens": 65}, r"decoding\.draft_tokens=65 .* give 1 to 64 with decoding.system=bebop_tree$"),
        (
            {"draft_tokens": 6, "options": {"shape": FIVE}},
            r"decoding\.draft_tokens=6 .* give 1 to 5 with decoding.system=bebop_tree and its shape$",
        ),
        ({"options": {"ranks": [0.9, 0.2]}}, r"options\.ranks=.* give numbers above 0 that sum to 1 or less"),
    ],
}  # fmt: skip


def line(error: pytest.ExceptionInfo[UserError], longest: int = 400) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < longest
    return text


@pytest.mark.parametrize(
    ("system", "own", "words"), [(name, own, words) for name, rows in MISTAKES.items() for own, words in rows]
)
def test_a_mistake_in_decoding_is_one_line(system: str, own: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        DecodingConfig(system=system, **{"draft_tokens": SYSTEMS[system].draft_tokens, **own})
    line(error, 10_000 if "shape" in own.get("options", {}) else 400)  # a shape is told in full


def test_more_children_than_tokens_are_refused_by_the_engine() -> None:
    wide = DecodingConfig(system="bebop_tree", draft_tokens=6, options={"shape": [[rank] for rank in range(6)]})
    with pytest.raises(UserError, match="6 children need as many tokens, and there are 5"):
        TorchEngine(bare_policy(5), wide, slots=1, max_length=16)


def test_what_is_given_is_what_counts() -> None:
    """Limits, lengths and draft temperatures that are possible, and a shape for every number of nodes."""
    assert DecodingConfig(system="history", draft_tokens="auto").limit == 16
    assert DecodingConfig(draft_tokens="auto").limit == 5
    for most in (2, 7):
        config = DecodingConfig(draft_tokens="auto", most_drafts=most)
        assert config.limit == config.depth == most and config.timed
    assert DecodingConfig(draft_tokens=2).limit == 2 and not DecodingConfig(draft_tokens=2).timed
    assert not DecodingConfig(system="autoregressive", draft_tokens="auto").timed
    for system in ("target_only", "ngram", "autoregressive"):  # where a number would be ignored, so is auto
        config = DecodingConfig(system=system, draft_temperature="auto")
        assert not config.chooses_temperature
        assert config.temperature_of_drafts == (0 if system == "target_only" else None)
    for nodes in range(1, 65):
        paths = TreeOptions().paths(nodes)
        assert len(set(paths)) == nodes
        given = DecodingConfig(system="bebop_tree", draft_tokens=nodes, options={"shape": paths}).of(TreeOptions)
        assert given.paths(nodes) == paths


# ---- other engines


def on_sglang(decoding: DecodingConfig) -> None:
    sglang.refuse_system(decoding, SglangConfig(), "cuda")


@pytest.mark.parametrize(
    ("engine", "refuse", "system", "why"),
    [
        ("SGLang", on_sglang, "history", "its NGRAM drafts"),
        ("SGLang", on_sglang, "bebop_history", "its drafts are drawn from a mixture"),
        ("SGLang", on_sglang, "pipo", "its caches hold an entry for two"),
        ("vLLM", vllm.refuse_system, "bebop_history", "its drafts are drawn from a mixture"),
    ],
)
def test_other_engines_say_what_they_lack(
    engine: str, refuse: Callable[[DecodingConfig], None], system: str, why: str
) -> None:
    with pytest.raises(UserError) as error:
        refuse(DecodingConfig(system=system, draft_tokens=SYSTEMS[system].draft_tokens))
    assert line(error).startswith(f"decoding.system={system!r} is not possible with {engine}: {why}")


def test_verl_refuses_pairs() -> None:
    with pytest.raises(UserError) as error:
        parse_engine({"system": "pipo"})
    assert line(error).startswith(
        "engine_kwargs.bebop.system='pipo' is not possible: completions drawn in pairs cannot be"
    )


# ---- training


@pytest.mark.parametrize("rescore", [False, True])
def test_a_job_cannot_train_on_pairs_and_names_what_does(rescore: bool) -> None:
    """Rescoring, which helps other inexact systems, does not help here."""
    with pytest.raises(UserError) as error:
        from_dict(JobConfig, {"decoding": {"system": "pipo", "draft_tokens": 1}, "algorithm": {"rescore": rescore}})
    text = line(error)
    assert text.startswith("decoding.system='pipo' is not possible: ")
    assert "cannot be scored again token by token" in text
    assert "python -m bebop.adapt part=pipo options.stage=opd" in text
    assert from_dict(JobConfig, {"decoding": {"system": "pad"}}).decoding.system == "pad"


def test_the_command_ends_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(UserError, match=r"'pipo' is not possible: .*stage=opd"):
        main(["decoding=pipo", f"runtime.dir={folder}"])
    assert not folder.exists()
    assert job_config(["decoding=bebop"]).decoding.system == "bebop", "the same command with another system"


def test_no_other_system_is_refused_for_pairs() -> None:
    assert [name for name, system in SYSTEMS.items() if system.train_error] == ["pipo"]
    reason = SYSTEMS["pipo"].serve_error
    assert reason and [name for name, system in SYSTEMS.items() if system.serve_error == reason] == ["pipo"]


# ---- the monitor


@pytest.mark.parametrize(
    ("system", "monitor"),
    [("history", {}), ("bebop_history", {"decode_stats": False}), ("bebop_history", {"drift": False})],
)
def test_nothing_is_concluded_from_how_often_history_is_right(
    system: str, monitor: dict[str, Any], tmp_path: Path
) -> None:
    """Without a head, or without its own overlap, there is nothing to watch."""
    config = from_dict(JobConfig, {"decoding": {"system": system}, "monitor": monitor})
    assert isinstance(_monitor(config, tmp_path, 0), NullMonitor)
    assert isinstance(_monitor(from_dict(JobConfig, {}), tmp_path, 0), JobMonitor)
    with pytest.raises(UserError, match=r"cotrain.mode='auto' is not possible: it takes the monitor's word"):
        from_dict(JobConfig, {"decoding": {"system": system}, "monitor": monitor, "cotrain": {"mode": "auto"}})
    found = said(Run(name="r", config={"decoding": {"system": system}}, steps=[1], columns={"reward/mean": [0.5]}), [])
    assert "drafts from history" in found.verdict and "draft head" not in found.verdict and found.advice == NOTHING


def test_the_head_beside_history_is_watched_by_its_probe_set(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"decoding": {"system": "bebop_history"}, "cotrain": {"mode": "auto"}}
    assert isinstance(_monitor(from_dict(JobConfig, sections), tmp_path, 0), JobMonitor)
    with pytest.raises(UserError, match=r"beside history monitor.decode_stats=true and monitor.probe_every above 0"):
        from_dict(JobConfig, {**sections, "monitor": {"probe_every": 0}})
