"""What drafts from history do not go with is refused, or left out, in words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bebop.config import DecodingConfig, JobConfig
from bebop.config_engines import SglangConfig
from bebop.errors import UserError
from bebop.monitor.watch import NoMonitor, Watch
from bebop.parsing import from_dict
from bebop.report.runs import Run
from bebop.report.verdict import NOTHING, said
from bebop.rollout.sglang import arguments as sglang
from bebop.rollout.vllm import arguments as vllm
from bebop.runtime import _monitor
from bebop.systems import SYSTEMS

HISTORY = [name for name, system in SYSTEMS.items() if system.history]


def on_sglang(decoding: DecodingConfig) -> None:
    sglang.refuse_system(decoding, SglangConfig(), "cuda")


@pytest.mark.parametrize(
    ("engine", "refuse", "system", "why"),
    [
        ("SGLang", on_sglang, "history", "its NGRAM drafts"),
        ("SGLang", on_sglang, "bebop_history", "its drafts are drawn from a mixture"),
        ("vLLM", vllm.refuse_system, "bebop_history", "its drafts are drawn from a mixture"),
    ],
)
def test_other_engines_say_what_they_lack(
    engine: str, refuse: Callable[[DecodingConfig], None], system: str, why: str
) -> None:
    with pytest.raises(UserError) as error:
        refuse(DecodingConfig(system=system))
    text = str(error.value)
    assert text.startswith(f"decoding.system={system!r} is not possible with {engine}: {why}")
    assert "\n" not in text and len(text) < 400


@pytest.mark.parametrize(
    ("system", "monitor"),
    [("history", {}), ("bebop_history", {"decode_stats": False}), ("bebop_history", {"drift": False})],
)
def test_nothing_is_concluded_from_how_often_history_is_right(
    system: str, monitor: dict[str, Any], tmp_path: Path
) -> None:
    """Without a head, or without its own overlap, there is nothing to watch."""
    config = from_dict(JobConfig, {"decoding": {"system": system}, "monitor": monitor})
    assert isinstance(_monitor(config, tmp_path, 0), NoMonitor)
    assert isinstance(_monitor(from_dict(JobConfig, {}), tmp_path, 0), Watch)
    with pytest.raises(UserError, match=r"cotrain.mode='auto' is not possible: it takes the monitor's word"):
        from_dict(JobConfig, {"decoding": {"system": system}, "monitor": monitor, "cotrain": {"mode": "auto"}})
    told = said(Run(name="r", config={"decoding": {"system": system}}, steps=[1], columns={"reward/mean": [0.5]}), [])
    assert "drafts from history" in told.verdict and "draft head" not in told.verdict and told.advice == NOTHING


def test_the_head_beside_history_is_watched_by_its_probe_set(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"decoding": {"system": "bebop_history"}, "cotrain": {"mode": "auto"}}
    assert isinstance(_monitor(from_dict(JobConfig, sections), tmp_path, 0), Watch)
    with pytest.raises(UserError, match=r"beside history monitor.decode_stats=true and monitor.probe_every above 0"):
        from_dict(JobConfig, {**sections, "monitor": {"probe_every": 0}})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": 0}, "options.tokens=0 is not possible: give"),
        ({"answers": 0}, "options.answers=0 is not possible: give"),
        ({"siblings": 3}, "options.siblings=3 is not possible: true or false"),
        ({"token": 3}, "options.token"),
    ],
)
def test_a_mistake_in_its_options_is_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        DecodingConfig(system="history", options=options)
    assert words in str(error.value) and "\n" not in str(error.value)
