"""The work of a cycle between logits and tokens: from probabilities, and from the logits themselves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bebop.kernels import draw
from bebop.kernels.verify import chain_verify, sample
from bebop.rollout.decoding.sampling import BatchSampling, entropy


class SamplingCycle:
    """Drafting, verification and measurement from given logits: all numbers that a cycle of system bebop needs."""

    def __init__(self, device: torch.device, batch: int, drafts: int, vocabulary: int) -> None:
        """Make similar bf16 logits of drafts (K of [B, V]) and target [B, K + 1, V]."""
        target = torch.randn(batch, drafts + 1, vocabulary, device=device).mul_(2)
        self.drafts = [
            (target[:, j] + 0.4 * torch.randn(batch, vocabulary, device=device)).bfloat16() for j in range(drafts)
        ]
        self.target = target.bfloat16()
        self.temperature = torch.full((batch,), 0.7, device=device)
        self.draws = torch.rand(batch, drafts, dtype=torch.float64, device=device)
        self.checks = torch.rand(batch, drafts + 2, dtype=torch.float64, device=device)

    def from_probabilities(self) -> tuple[Tensor, ...]:
        """Compute a cycle from probabilities, as ``draft_verify.py`` does on a CPU.

        Return tokens, accepted drafts, overlap, p(argmax q), entropies and log-probs.
        """
        sampling, K = BatchSampling(temperature=self.temperature), len(self.drafts)
        distributions = [sampling.probs(logits[:, None])[:, 0] for logits in self.drafts]
        spreads = torch.stack([entropy(one) for one in distributions], 1)
        tokens = torch.stack([sample(one, self.draws[:, j]) for j, one in enumerate(distributions)], 1)
        q, p = torch.stack(distributions, 1), sampling.probs(self.target)
        accepted, token = chain_verify(tokens, q, p, self.checks)
        overlap, chance = torch.minimum(p[:, :K], q).sum(-1), p[:, :K].gather(-1, q.argmax(-1, keepdim=True))[..., 0]
        emitted = torch.cat([tokens, token[:, None]], 1)
        logprobs = p.gather(-1, emitted[..., None])[..., 0].log()
        return emitted, accepted, overlap, chance, spreads, entropy(p[:, :K]), logprobs

    def from_logits(self) -> tuple[Tensor, ...]:
        """Compute the same numbers as ``from_probabilities`` from logits."""
        K = len(self.drafts)
        made = [draw.draw(logits, self.temperature, self.draws[:, j]) for j, logits in enumerate(self.drafts)]
        rows, tokens = [one for one, _ in made], torch.stack([token for _, token in made], 1)
        target = draw.normalise(self.target, self.temperature)
        accepted, token, overlap = draw.verify(tokens, rows, target, self.checks)
        assert overlap is not None
        chance = target.logprobs(torch.cat([one.best for one in rows], 1)).exp()
        emitted = torch.cat([tokens, token[:, None]], 1)
        spreads = torch.cat([one.entropy for one in rows], 1)
        return emitted, accepted, overlap, chance, spreads, target.entropy[:, :K], target.logprobs(emitted)

    def bytes_of_logits(self) -> int:
        """Return the bytes that the kernels of ``from_logits`` move, except one tile per draw.

        This assumes that all drafts are accepted: all logits once, and the logits of each draft and of the target at
        its place once more.
        """
        drafts = sum(logits.numel() for logits in self.drafts)
        return 2 * (drafts + self.target.numel() + 2 * drafts)

    def bytes_of_probabilities(self) -> int:
        """Return the bytes that the operators of ``from_probabilities`` move: all of their inputs and outputs."""
        with Moved() as moved:
            self.from_probabilities()
        return moved.total


class Moved(TorchDispatchMode):
    """Counts the bytes of operators' inputs and outputs; views move nothing.

    For a gathering operator this is more than it reads, and Triton kernels are not seen at all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            given = [args[1:], out] if "gather" in str(func) else [args, out]
            tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
            self.total += sum(x.numel() * x.element_size() for x in tensors)
        return out


def cases(
    device: torch.device, batch: int, drafts: int, vocabulary: int
) -> dict[str, tuple[Callable[[], object], float]]:
    """Return both ways by name, each with the bytes that it moves."""
    cycle = SamplingCycle(device, batch, drafts, vocabulary)
    return {
        "cycle from probabilities": (cycle.from_probabilities, cycle.bytes_of_probabilities()),
        "cycle from logits": (cycle.from_logits, cycle.bytes_of_logits()),
    }
