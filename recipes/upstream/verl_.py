"""verl, read without importing it: its servers want a GPU, or another engine beside them."""

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
# What SGLang 0.5.14 and newer calls drafts made and accepted, in meta_info.
NAMES = ("spec_num_proposed_drafts", "spec_num_correct_drafts")


def vllm_counts_by_a_name_that_vllm_has_not() -> bool:
    """``metrics.request_spec_decode_stats``; vLLM's own are ``outputs[0].spec_decode_metrics``, if asked for."""
    return "request_spec_decode_stats" in _source(VLLM) and not _vllm_has("request_spec_decode_stats")


def sglang_counts_by_names_that_are_gone() -> bool:
    """``meta_info.get(name, default)`` of names that newer versions do not send: the default, silently."""
    source = _source(SGLANG)
    return "spec_accept_token_num" in source and not any(name in source for name in NAMES)


def pieces_lose_their_counts() -> bool:
    """An answer that was aborted and resumed is put together anew, and the counts of its drafts are left out."""
    return "spec_num_draft_tokens" not in _source(CLIENT)


def sglang_updates_without_a_session() -> bool:
    """SGLang 0.5.23: weights "must run between begin_weight_update() and end_weight_update()"."""
    return not any("begin_weight_update" in path.read_text() for path in _root().rglob("*.py"))


def sglang_arguments_are_taken_for_a_dataclass() -> bool:
    """SGLang 0.5.23: ``ServerArgs`` is none, and ``dataclasses.fields`` raises a TypeError before the server starts."""
    return "dataclasses.fields(ServerArgs)" in _source(SGLANG)


def the_head_is_sought_on_the_first_runner() -> bool:
    """``model_runner.drafter``, which vLLM's second runner has not: verl then updates the target alone."""
    source = _source(WORKER)
    return '"drafter", None' in source and "get_draft_model()" not in source and "speculator" not in source


def a_log_line_that_fails() -> bool:
    """``logger.info(..., flush=True)``: a TypeError as soon as the level is INFO, with ``hybrid_engine=false``."""
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
