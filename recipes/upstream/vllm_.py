"""Defects of vLLM, reproduced with its build for CPUs."""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from recipes.upstream.defect import Defect

MODEL = "tiny"  # has an MTP head


def expand_is_thrown_away() -> bool:
    """Return whether the expansion of a request's temperature to its drafts is written to a copy that nobody reads."""
    import vllm._C  # noqa: F401
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    output = torch.full((3,), -1.0)
    _expand_kernel_impl(output, torch.tensor([0.5, 2.0]), torch.tensor([1, 3]), 0, 1)
    return output.tolist() != [0.5, 2.0, 2.0]


def top_k_of_nothing() -> bool:
    """Return whether top-k fails on no rows, in a step that verifies no draft: it takes the maximum of nothing."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    try:
        apply_top_k_top_p(torch.empty(0, 8), torch.empty(0, dtype=torch.int32), None)
    except RuntimeError:
        return True
    return False


def linear_layers_lose_their_weights() -> bool:
    """Return whether linear layers keep no weight after loading, so that no update can be written."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer.weight.numel() == 0


def keys_are_normed_by_the_first_weight() -> bool:
    """Return whether a norm of two layers at once, with weights 1 and 2, uses only the first weight."""
    from vllm import _custom_ops

    out, weights = torch.empty(2, 1, 8), torch.stack([torch.ones(8), torch.full((8,), 2.0)])
    _custom_ops.rms_norm(out, torch.ones(2, 1, 8), weights, 1e-6)
    return torch.equal(out[0], out[1])


def a_look_at_all_modules_trips_over_numba() -> bool:
    """Return whether replacing kernels for the CPU in every loaded module fails.

    The library object of numba makes up any attribute, and the search raises on it.
    """
    importlib.import_module("vllm.v1.spec_decode.ngram_proposer")  # vLLM's own module that imports numba
    from vllm.triton_utils import dispatcher

    try:
        dispatcher._rebind_kernels([])
    except AttributeError:
        return True
    return False


def checksums_leave_the_draft_out() -> bool:
    """Return whether the checksums of all weights omit a separate draft model loaded beside the target."""
    llm = _with_drafts()
    (digests,) = llm.collective_rpc("compute_weight_checksums")
    (drafted,) = llm.collective_rpc(_names_of_the_draft)
    return bool(drafted) and not any(name.endswith(own) for own in drafted for name in digests)


def experts_are_packed_once() -> bool:
    """Return whether the source packs experts for the CPU kernel only the first time."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module

    path = inspect.getsourcefile(module)
    assert path is not None
    _, _, setup = Path(path).read_text().partition("def _setup_kernel(")
    setup = setup.partition("\n    def ")[0]
    first = setup.partition("if not is_weight_update:")[2]
    lines = [line for line in first.splitlines() if "process_weights_after_loading(" in line]
    return bool(lines) and all(line.startswith(" " * 12) for line in lines)


def seeds_do_not_replay_drafts() -> bool:
    """Return whether repeats of one request with one seed differ when drafts are sampled."""
    from vllm import SamplingParams

    llm = _with_drafts()
    prompt = {"prompt_token_ids": [5, 6, 7, 8]}
    params = SamplingParams(seed=1, max_tokens=24, ignore_eos=True, detokenize=False)
    answers = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for _ in range(4)]
    return any(list(answer) != list(answers[0]) for answer in answers)


def block_verification_leaves_noise() -> bool:
    """Return whether block verification reads uniforms beyond the accepted length, which the next cycle uses again.

    It runs in another process.
    """
    program = (
        "from pathlib import Path; from importlib.util import find_spec; from recipes.certify import vllm_kernels; "
        "print(vllm_kernels.leaves_noise(Path(find_spec('vllm').origin).parents[1]))"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()[-1] == "True"


def _names_of_the_draft(worker: Any) -> list[str]:
    runner = worker.model_runner
    shared = {tensor.data_ptr() for tensor in runner.get_model().parameters()}
    return [name for name, tensor in runner.get_draft_model().named_parameters() if tensor.data_ptr() not in shared]


_KEPT: list[Any] = []


def _with_drafts() -> Any:
    """Return one engine for all reproductions, in this process.

    It runs with the fixes of Bebop's plugin, so that these defects can be reproduced in spite of the others.
    """
    if not _KEPT:
        from bebop.model.checkpoint import resolve

        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
            "BEBOP_VLLM_CPU": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        from vllm import LLM

        drafts = {"method": "mtp", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
        _KEPT.append(
            LLM(
                str(resolve(MODEL)),
                dtype="float32",
                enforce_eager=True,
                max_model_len=128,
                max_num_seqs=8,
                speculative_config=drafts,
                enable_prefix_caching=False,
                skip_tokenizer_init=True,
            )
        )
    return _KEPT[0]


DEFECTS = (
    Defect(name="vllm-expand", program="vllm", version="0.32.0", there=expand_is_thrown_away),
    Defect(name="vllm-top-k", program="vllm", version="0.32.0", there=top_k_of_nothing),
    Defect(name="vllm-linear", program="vllm", version="0.32.0", there=linear_layers_lose_their_weights),
    Defect(name="vllm-numba", program="vllm", version="0.32.0", there=a_look_at_all_modules_trips_over_numba),
    Defect(name="vllm-experts", program="vllm", version="0.32.0", there=experts_are_packed_once),
    Defect(name="vllm-dflash-keys", program="vllm", version="0.32.0", there=keys_are_normed_by_the_first_weight),
    Defect(name="vllm-checksums", program="vllm", version="0.32.0", there=checksums_leave_the_draft_out),
    Defect(name="vllm-block-noise", program="vllm", version="0.32.0", there=block_verification_leaves_noise),
    Defect(name="vllm-seeds", program="vllm", version="0.32.0", there=seeds_do_not_replay_drafts),
)
