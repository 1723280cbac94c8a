"""Defects of SGLang, found in its source or by running its n-gram corpus, tensor reduction and requests."""

import ast
from array import array
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from recipes.upstream.defect import Defect


def the_engine_passes_fewer_fields_on() -> bool:
    """Return whether ``Engine.async_generate`` lacks ``extra_key``, which HTTP has.

    ``extra_key`` separates the cached prefixes of different weight versions.
    """
    engine = _class("srt/entrypoints/engine.py", "Engine")
    (call,) = (node for node in engine.body if getattr(node, "name", "") == "async_generate")
    assert isinstance(call, ast.AsyncFunctionDef)
    passed = {argument.arg for argument in call.args.args + call.args.kwonlyargs}
    return "extra_key" not in passed


def errors_of_plugins_are_swallowed() -> bool:
    """Return whether the server only logs an exception of a plugin and starts without the plugin."""
    tree = ast.parse((_root() / "srt/plugins/__init__.py").read_text())
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    return any(not any(isinstance(node, ast.Raise) for node in ast.walk(handler)) for handler in handlers)


def padding_is_drafted_again_and_again() -> bool:
    """Return whether a lookup with too few drafts is padded with token 0, each pad a separate draft of the next place.

    Verification adds p(0) once for each of them (``prob_acc`` in ``speculative/sampling.cuh``).
    """
    corpus = _corpus(nodes=6)
    corpus.batch_put([[1, 2, 3]])
    corpus.synchronize()
    return _next(corpus, [1, 2], nodes=6) == [3, 0, 0, 0, 0]


def corpora_have_one_budget() -> bool:
    """Return whether external corpora beyond the shared node budget disable all of them silently."""
    corpus = _corpus(nodes=6, external_sam_budget=3)
    found = []
    for count in range(4):
        name = f"corpus {count}"
        corpus.commit_external_corpus_load(name, corpus.load_external_corpus_named(name, [[1, 2, 3 + count]]))
        found.append(max(_next(corpus, [1, 2], nodes=6)) > 0)
    return found == [True, True, True, False]


def tensors_of_the_cpu_are_not_handed_over() -> bool:
    """Return whether SGLang's tensor reduction fails on CPU tensors: it reads a device index that they lack."""
    from sglang.srt.utils import patch_torch
    from torch.multiprocessing import reductions

    # Patch for this call only: the rest of the process keeps torch's own reduction.
    reductions._reduce_tensor_original = reductions.reduce_tensor
    try:
        patch_torch._reduce_tensor_modified(torch.zeros(2))
    except IndexError:
        return True
    finally:
        del reductions._reduce_tensor_original
    return False


def aborted_requests_go_on_behind_their_end() -> bool:
    """Return whether an aborted request takes one more step without a check for its end.

    Tokens of that step behind the stop token then stay. The request counts as cut off, so a client that resumes it
    continues after the stop token.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=8, stop_token_ids=[9])
    params.normalize(None)
    request = Req("0", "", array("q", [1, 2]), params, vocab_size=16)
    request.output_ids = array("q", [5, 9, 7])
    request.to_finish = FINISH_ABORT()
    request.update_finish_state(new_accepted_len=3)
    return request.finished_reason.to_json()["type"] == "abort" and len(request.output_ids_through_stop) == 3


def _corpus(nodes: int, **more: int) -> Any:
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    return NgramCorpus(draft_token_num=nodes, min_bfs_breadth=1, max_bfs_breadth=1, **more)


def _next(corpus: Any, context: list[int], nodes: int) -> list[int]:
    """Return the drafts of the place after a context: nodes whose only ancestor is the newest token."""
    tokens, mask = corpus.batch_get([f"{id(context)}"], [context], [len(context)])
    depth = mask.reshape(nodes, nodes).sum(1) - 1
    return [int(token) for token, place in zip(tokens, depth, strict=True) if place == 1]


@cache
def _root() -> Path:
    spec = find_spec("sglang")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _class(path: str, name: str) -> ast.ClassDef:
    tree = ast.parse((_root() / path).read_text())
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    return found


DEFECTS = (
    Defect(name="sglang-ngram-pads", program="sglang", version="0.5.23", there=padding_is_drafted_again_and_again),
    Defect(name="sglang-abort-end", program="sglang", version="0.5.23", there=aborted_requests_go_on_behind_their_end),
    Defect(name="sglang-corpora", program="sglang", version="0.5.23", there=corpora_have_one_budget),
    Defect(name="sglang-fields", program="sglang", version="0.5.23", there=the_engine_passes_fewer_fields_on),
    Defect(name="sglang-plugins", program="sglang", version="0.5.23", there=errors_of_plugins_are_swallowed),
    Defect(name="sglang-cpu-tensors", program="sglang", version="0.5.23", there=tensors_of_the_cpu_are_not_handed_over),
)
