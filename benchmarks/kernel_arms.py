"""Arms of the kernel benchmark: Bebop's kernels, plain and compiled PyTorch, and other projects' if installed.

A peer is imported. If its package cannot be imported, its one file is loaded from the Python path: an unpacked wheel on
PYTHONPATH is enough.
"""

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from bebop.kernels.block_verify import block_verify
from bebop.kernels.block_verify import reference as block_reference
from bebop.kernels.draft_losses import needs_labels
from bebop.kernels.verify import chain_verify, reference


class Skip(Exception):
    """Raised by an arm that cannot be measured here; the message states why."""


Loss = Callable[[Tensor, Tensor], Tensor]  # draft, target -> [N]
Linear = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden, weight, target hidden -> [N]
MakeLoss = Callable[[str], Loss]
MakeLinear = Callable[[str], Linear]
LabelledLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  # draft, target, labels -> [N]
MakeVerify = Callable[..., Callable[[], object]]  # device, tokens, draft, target, uniforms


def _peer(module: str, distribution: str) -> ModuleType:
    """Import a module of another project, or load its file."""
    try:
        return importlib.import_module(module)
    except ImportError as failure:
        reason = failure
    relative = Path(*module.split(".")).with_suffix(".py")
    for folder in sys.path:
        file = Path(folder) / relative
        if file.is_file() and (spec := importlib.util.spec_from_file_location(file.stem, file)) and spec.loader:
            loaded = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(loaded)
            except ImportError as failure:
                raise Skip(f"{distribution} is there but cannot be loaded: {failure}") from failure
            return loaded
    raise Skip(f"{distribution} is not installed ({reason})") from reason


def _own(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as failure:
        raise Skip(f"{module} cannot be imported: {failure}") from failure


def _needs_gpu(device: str, name: str) -> None:
    if torch.device(device).type != "cuda":
        raise Skip(f"{name} needs a GPU")


# ---- losses from logits


def tv_of_softmaxes(draft: Tensor, target: Tensor) -> Tensor:
    """Return the total variation by the most direct formula."""
    return 1 - torch.minimum(draft.float().softmax(-1), target.float().softmax(-1)).sum(-1)


def _bebop_loss(device: str) -> Loss:
    losses = _own("bebop.kernels.losses")
    return lambda draft, target: losses.tv_loss(draft, target).loss


def _compiled_loss(device: str) -> Loss:
    _needs_gpu(device, "torch.compile, as it is measured here,")
    torch._dynamo.reset()  # each shape for itself
    return torch.compile(tv_of_softmaxes, dynamic=False)


def _speculators_loss(device: str) -> Loss:
    _needs_gpu(device, "the fused loss of speculators")
    fused = _peer("speculators.losses.fused", "speculators")
    return lambda draft, target: fused.fused_tv_loss(draft[None], target[None])


def _liger_loss(device: str) -> Loss:
    _needs_gpu(device, "the fused loss of Liger")
    fused = _peer("liger_kernel.ops.fused_ce_tvd", "liger-kernel")

    def loss(draft: Tensor, target: Tensor) -> Tensor:
        labels = torch.zeros(len(draft), dtype=torch.long, device=draft.device)
        tvd: Tensor = fused.LigerFusedCETVDFunction.apply(draft, target, labels)[1]
        return tvd

    return loss


LOSSES: dict[str, MakeLoss] = {
    "bebop": _bebop_loss,
    "eager": lambda device: tv_of_softmaxes,
    "torch.compile": _compiled_loss,
    "speculators": _speculators_loss,
    "liger": _liger_loss,
}


# ---- losses of every kind from logits, on a CPU


def _bebop_kind(kind: str) -> LabelledLoss:
    losses, labelled = _own("bebop.kernels.losses"), needs_labels(kind)
    return lambda draft, target, labels: (
        losses.tv_loss(draft, target, kind=kind, labels=labels if labelled else None).loss
    )


def _hybrid(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    tv = tv_of_softmaxes(draft, target)
    weight = (-3 * (1 - tv.detach())).exp()
    return weight * EAGER["kl"](draft, target, labels) + (1 - weight) * tv


def _jensen_shannon(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    q, p = draft.log_softmax(-1), target.log_softmax(-1)
    middle = torch.logaddexp(q, p) - math.log(2)
    both = [kl_div(middle, x, reduction="none", log_target=True).sum(-1) for x in (q, p)]
    return (both[0] + both[1]) / 2


# The direct formulas. All compute less than ours, which also give the overlap and both entropies; ce, hard_ce least.
EAGER: dict[str, LabelledLoss] = {
    "tv": lambda q, p, labels: tv_of_softmaxes(q, p),
    "ce": lambda q, p, labels: cross_entropy(q, p.softmax(-1), reduction="none"),
    "hard_ce": lambda q, p, labels: cross_entropy(q, labels, reduction="none"),
    "kl": lambda q, p, labels: kl_div(q.log_softmax(-1), p.softmax(-1), reduction="none").sum(-1),
    "rkl": lambda q, p, labels: kl_div(p.log_softmax(-1), q.log_softmax(-1), reduction="none", log_target=True).sum(-1),
    "jsd": _jensen_shannon,
    "nla": lambda q, p, labels: -(1 - tv_of_softmaxes(q, p)).log(),
    "hybrid": _hybrid,
}
# Of 0.9; its ce looks at the target's likeliest token, as the labels here do.
SPECULATORS = {"tv": "tv_loss", "hard_ce": "ce_loss", "kl": "kl_div_loss", "rkl": "reverse_kl_div_loss",
               "jsd": "js_div_loss", "nla": "neg_log_acceptance_loss", "hybrid": "lk_hybrid_loss"}  # fmt: skip


def _eager_kind(kind: str) -> LabelledLoss:
    if kind not in EAGER:
        raise Skip(f"there is no plain {kind}")
    return EAGER[kind]


def _speculators_kind(kind: str) -> LabelledLoss:
    """Return a loss of speculators that runs on a CPU."""
    peer = _peer("speculators.losses.eager", "speculators")
    if kind not in SPECULATORS:
        raise Skip(f"speculators has no {kind}")
    loss = getattr(peer, SPECULATORS[kind])
    return lambda draft, target, labels: loss(draft[None], target[None])[0]


KINDS: dict[str, Callable[[str], LabelledLoss]] = {
    "bebop": _bebop_kind,
    "eager": _eager_kind,
    "speculators": _speculators_kind,
}


# ---- losses from hidden states


def _bebop_linear(device: str) -> Linear:
    losses = _own("bebop.kernels.linear_losses")
    return lambda hidden, weight, states: losses.linear_draft_loss(hidden, weight, states, weight, kind="tv").loss


def _logits_then_bebop(device: str) -> Linear:
    losses = _own("bebop.kernels.losses")
    return lambda hidden, weight, states: losses.tv_loss(hidden @ weight.T, states @ weight.T).loss


LINEAR: dict[str, MakeLinear] = {
    "bebop": _bebop_linear,
    "bebop from logits": _logits_then_bebop,
    "eager": lambda device: lambda hidden, weight, states: tv_of_softmaxes(hidden @ weight.T, states @ weight.T),
}


# ---- chain verification


def _sglang_verify(
    device: str, tokens: Tensor, q: Tensor, p: Tensor, u: Tensor, block: bool = False
) -> Callable[[], object]:
    """Return the verifier of SGLang 0.5.23; ``block`` selects block verification."""
    _needs_gpu(device, "the verifier of SGLang")
    peer = _peer("sglang.kernels.ops.speculative.reject_sampling", "sglang")
    batch, drafts = tokens.shape
    candidates = torch.cat([tokens[:, :1], tokens], 1)  # slot 0 is the token before the drafts
    index = torch.arange(batch * (drafts + 1), dtype=torch.int32, device=device).view(batch, -1)
    predicts = torch.zeros(batch * (drafts + 1), dtype=torch.int32, device=device)
    accept_index, accepted = torch.full_like(index, -1), torch.zeros(batch, dtype=torch.int32, device=device)
    tests, final = u[:, : drafts + 1].float(), u[:, -1].float().contiguous()

    options = {"block_verification": True} if block else {}  # older ones have no such argument

    def verify() -> None:
        peer.chain_speculative_sampling_triton(
            predicts, accept_index, accepted, candidates, index, None, None, tests, final, p, q, 1.0, 1.0, True,
            **options,
        )  # fmt: skip

    return _tried(verify, "sglang")


def _vllm_verify(device: str, tokens: Tensor, q: Tensor, p: Tensor, u: Tensor) -> Callable[[], object]:
    """Return the verifier of vLLM.

    It also draws the bonus token and its own random numbers; other arms receive these or draw them inside.
    """
    _needs_gpu(device, "the verifier of vLLM")
    peer = _peer("vllm.v1.sample.rejection_sampler", "vllm")
    batch, drafts = tokens.shape
    vocabulary = p.shape[-1]
    ends = torch.arange(1, batch + 1, dtype=torch.int32, device=device) * drafts
    flat_q = q.reshape(-1, vocabulary)
    flat_p, last = p[:, :drafts].reshape(-1, vocabulary).contiguous(), p[:, drafts].contiguous()
    temperature = torch.ones(batch, device=device)
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=temperature, generators={})
    flat_tokens, counts = tokens.reshape(-1).int(), [drafts] * batch

    def verify() -> None:
        bonus = (last / torch.empty_like(last).exponential_()).argmax(-1, keepdim=True).int()
        peer.rejection_sample(flat_tokens, counts, drafts, ends, flat_q, flat_p, bonus, metadata)

    return _tried(verify, "vllm")


def _tried(verify: Callable[[], object], name: str) -> Callable[[], object]:
    """Call ``verify`` once and return it; skip a peer with a changed signature or requirement, with its message."""
    try:
        verify()
    except (TypeError, ValueError, AttributeError, AssertionError, RuntimeError) as failure:
        if isinstance(failure, torch.OutOfMemoryError):
            raise
        raise Skip(f"{name} did not run: {type(failure).__name__}: {str(failure).splitlines()[0]}") from failure
    return verify


def _read(device: str, tokens: Tensor, q: Tensor, p: Tensor, u: Tensor) -> Callable[[], object]:
    """Return a sum over the rows that give the next tokens, contiguous in memory: the cost of reading them once."""
    accepted, _ = reference(tokens, q, p, u)
    requests = torch.arange(len(tokens), device=p.device)
    rejected = accepted < tokens.shape[1]
    rows = torch.cat([p[requests, accepted], q[requests[rejected], accepted[rejected]]])
    return lambda: rows.sum(-1)


PROBS: dict[str, MakeVerify] = {
    "bebop": lambda device, *inputs: lambda: chain_verify(*inputs),
    "eager": lambda device, *inputs: lambda: reference(*inputs),
    "sglang": _sglang_verify,
    "vllm": _vllm_verify,
    "read its rows once": _read,
}
BLOCK: dict[str, MakeVerify] = {
    "bebop": lambda device, *inputs: lambda: block_verify(*inputs),
    "eager": lambda device, *inputs: lambda: block_reference(*inputs),
    "sglang": partial(_sglang_verify, block=True),
}
