"""Defects of verl, found in its source without importing it: its servers need a GPU, or another engine beside them."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from recipes.upstream.defect import Defect

VLLM = "workers/rollout/vllm_rollout/vllm_async_server.py"
WORKER = "workers/rollout/vllm_rollout/utils.py"
SGLANG = "workers/rollout/sglang_rollout/async_sglang_server.py"
CLIENT = "workers/rollout/llm_server.py"
SEPARATE = "trainer/ppo/v1"
# Names of proposed and accepted drafts in meta_info, in SGLang 0.5.14 and newer.
NAMES = ("spec_num_proposed_drafts", "spec_num_correct_drafts")


def vllm_counts_by_a_name_that_vllm_has_not() -> bool:
    """Return whether verl reads ``metrics.request_spec_decode_stats``, which vLLM does not have.

    vLLM's own counts are ``outputs[0].spec_decode_metrics``, if requested.
    """
    return "request_spec_decode_stats" in _source(VLLM) and not _vllm_has("request_spec_decode_stats")


def sglang_counts_by_names_that_are_gone() -> bool:
    """Return whether verl reads names from ``meta_info`` that newer SGLang does not send.

    ``meta_info.get(name, default)`` then silently gives the default.
    """
    source = _source(SGLANG)
    return "spec_accept_token_num" in source and not any(name in source for name in NAMES)


def pieces_lose_their_counts() -> bool:
    """Return whether a completion that was aborted and resumed loses its draft counts when its pieces are merged."""
    return "spec_num_draft_tokens" not in _source(CLIENT)


def sglang_updates_without_a_session() -> bool:
    """Return whether verl never opens a weight update.

    SGLang 0.5.23 demands it: weights "must run between begin_weight_update() and end_weight_update()".
    """
    return not any("begin_weight_update" in path.read_text() for path in _root().rglob("*.py"))


def sglang_arguments_are_taken_for_a_dataclass() -> bool:
    """Return whether verl calls ``dataclasses.fields`` on ``ServerArgs``.

    In SGLang 0.5.23 that is no dataclass, so a TypeError is raised before the server starts.
    """
    return "dataclasses.fields(ServerArgs)" in _source(SGLANG)


def the_head_is_sought_on_the_first_runner() -> bool:
    """Return whether verl reads ``model_runner.drafter``, which vLLM's second runner lacks.

    verl then updates only the target.
    """
    source = _source(WORKER)
    return '"drafter", None' in source and "get_draft_model()" not in source and "speculator" not in source


def a_log_line_that_fails() -> bool:
    """Return whether verl calls ``logger.info(..., flush=True)``.

    That raises a TypeError as soon as the level is INFO, with ``hybrid_engine=false``.
    """
    calls = (
        node
        for path in (_root() / SEPARATE).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "logger.info"
    )
    return any(keyword.arg == "flush" for call in calls for keyword in call.keywords)


@cache
def _root() -> Path:
    spec = find_spec("verl")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _source(path: str) -> str:
    return (_root() / path).read_text()


def _vllm_has(name: str) -> bool:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return False
    return any(name in path.read_text() for path in Path(spec.origin).parent.rglob("*.py"))


DEFECTS = (
    Defect(name="verl-vllm-counts", program="verl", version="0.9.1", there=vllm_counts_by_a_name_that_vllm_has_not),
    Defect(name="verl-sglang-counts", program="verl", version="0.9.1", there=sglang_counts_by_names_that_are_gone),
    Defect(name="verl-async-counts", program="verl", version="0.9.1", there=pieces_lose_their_counts),
    Defect(name="verl-sglang-sessions", program="verl", version="0.9.1", there=sglang_updates_without_a_session),
    Defect(
        name="verl-sglang-arguments",
        program="verl",
        version="0.9.1",
        there=sglang_arguments_are_taken_for_a_dataclass,
    ),
    Defect(name="verl-second-runner", program="verl", version="0.9.1", there=the_head_is_sought_on_the_first_runner),
    Defect(name="verl-flush", program="verl", version="0.9.1", there=a_log_line_that_fails),
)
