"""Computes seconds and bytes of a job from the data of its GPUs and its model; nothing is measured.

``bebop/simulation/roofline.py`` computes a single pass. The simulator's costs are linear in the number of rows. Here
they are the chord from one row to all slots, which lies above a convex roofline.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from bebop.config.simulate import CompletionsConfig, CostsConfig
from bebop.simulation.roofline import BF16, GIGABYTE, Gpu, Model, pass_seconds

# Bytes of a parameter: weight, gradient and both moments of Adam in fp32, as trainer/ and verl's FSDP2 keep them.
OPTIMIZER = 16
# Kept for the backward pass, a token and layer, in units of the hidden size: 34 bytes with attention that keeps no
# scores (Korthikanti et al., 2022, "Reducing Activation Recomputation", section 4); 2 where layers are computed again.
KEPT, KEPT_INPUTS = 34, 2
QUANTILES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of completions in tokens: moments of the simulator's log-normal, cut at the longest."""

    mean: float
    weighted: float  # mean over tokens of the length of their completion: E L^2 / E L
    prompt: float
    longest: int  # prompt and completion

    @classmethod
    def of(cls, answers: CompletionsConfig) -> "Lengths":
        """Compute the moments from quantiles."""
        normal = NormalDist(float(np.log(answers.median)), max(answers.sigma, 1e-9))
        logs = [normal.inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)]
        drawn = np.minimum(np.exp(logs), answers.longest)
        mean = float(drawn.mean())
        weighted = float((drawn**2).mean()) / mean
        return cls(mean=mean, weighted=weighted, prompt=answers.prompt, longest=int(answers.prompt) + answers.longest)

    @property
    def context(self) -> float:
        """Return the mean number of tokens before the decoded position of a row: long completions run for longer."""
        return self.prompt + self.weighted / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Use of the GPUs by a job."""

    tensor_parallel: int  # GPUs of one engine
    slots: int  # rows of one engine
    trainer_gpus: int
    sequence_parallel: int  # GPUs of the trainer that share one completion
    recompute: bool  # whether the trainer computes layers again in the backward pass
    micro_batch: int  # tokens that one group of sequence_parallel GPUs trains on at a time
    by_network: bool  # whether weights go from GPU to GPU, or through Ray's object store
    one_machine: bool  # whether trainer and engines share a machine


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds and bytes of the parts of a job."""

    gpu: Gpu
    model: Model
    plan: Plan
    lengths: Lengths

    def passes(self, rows: int, positions: int, layers: int, weights: float) -> float:
        """Return the seconds of a pass over ``rows * positions`` tokens that reads ``weights`` parameters."""
        return pass_seconds(
            self.gpu, self.model, self.plan.tensor_parallel, rows=rows, positions=positions,
            context=self.lengths.context, layers=layers, multiplied=weights, read_bytes=BF16 * weights,
        )  # fmt: skip

    def target(self, rows: int, positions: int) -> float:
        """Return the seconds of a policy pass that verifies ``positions - 1`` drafts of each row."""
        return self.gpu.launch + self.passes(rows, positions, self.model.layers, self.model.multiplied)

    def draft(self, rows: int) -> float:
        """Return the seconds of a step of the head, with the output matrix."""
        return self.gpu.draft_launch + self.passes(rows, 1, 1, self.model.head + self.model.output)

    def prefill(self) -> float:
        """Return the seconds of one prompt; a prefix that a group shares counts for each of its completions."""
        ranks, prompt = self.plan.tensor_parallel, self.lengths.prompt
        products = 2 * self.model.multiplied * prompt + self.model.layers * self.model.attended * prompt**2 / 2
        return products / (ranks * self.gpu.flops * self.gpu.products)

    def update_token(self) -> float:
        """Return the seconds of training on one token with all GPUs: forward, and backward at twice its price."""
        length = self.lengths.prompt + self.lengths.weighted
        forward = 2 * self.model.multiplied + self.model.layers * self.model.attended * length / 2
        return forward * (4 if self.plan.recompute else 3) / (self.plan.trainer_gpus * self.gpu.flops * self.gpu.mfu)

    def update(self) -> float:
        """Return the seconds of the optimizer, which reads and writes its state."""
        kept = OPTIMIZER * self.model.parameters / self.plan.trainer_gpus
        return 2 * kept / (self.gpu.bandwidth * self.gpu.traffic)

    def weights(self) -> tuple[float, float, float]:
        """Return the bytes per second into one engine, the seconds to gather the weights, and those to load them."""
        gpu, size, ranks = self.gpu, BF16 * self.model.parameters, self.plan.tensor_parallel
        if self.plan.by_network:  # each GPU of the engine has a port of its own
            together = size / (gpu.network * gpu.sent)
            return ranks * gpu.network * gpu.sent, together, size / (ranks * gpu.bandwidth * gpu.traffic)
        through = gpu.host * gpu.sent if self.plan.one_machine else gpu.object_store
        return through, size / (gpu.host * gpu.sent), size / (gpu.host * gpu.sent)

    def costs(self, drafts: int) -> CostsConfig:
        """Return the simulator's costs for K ``drafts``."""
        slots, further = self.plan.slots, max(1, self.plan.slots - 1)
        one, full, verified = self.target(1, 1), self.target(slots, 1), self.target(slots, drafts + 1)
        bandwidth, fetch, load = self.weights()
        return CostsConfig(
            cycle=one,
            row=(full - one) / further,
            position=(verified - full) / (max(1, drafts) * slots),
            draft=self.draft(1),
            draft_row=(self.draft(slots) - self.draft(1)) / further,
            prefill=self.prefill(),
            update=self.update(),
            update_token=self.update_token(),
            weights=BF16 * self.model.parameters / GIGABYTE,
            bandwidth=bandwidth / GIGABYTE,
            fetch=fetch,
            load=load,
        )

    # ---- memory, in bytes of one GPU

    def engine_bytes(self) -> float:
        """Return the bytes of weights, head and KV cache: of all slots at mean context, or of one longest row."""
        model, ranks = self.model, self.plan.tensor_parallel
        tokens = max(self.plan.slots * self.lengths.context, self.lengths.longest)
        cached = (model.layers + 1) * model.kv_bytes * tokens
        return (BF16 * (model.parameters + model.head) + cached) / ranks

    def trainer_bytes(self) -> float:
        """Return the bytes of the optimizer, two gathered layers with gradients, and the kept activations."""
        model, plan = self.model, self.plan
        tokens = plan.micro_batch / plan.sequence_parallel
        gathered = 4 * BF16 * max(model.layer, model.output)
        layers = KEPT_INPUTS * model.layers + KEPT if plan.recompute else KEPT * model.layers
        return OPTIMIZER * model.parameters / plan.trainer_gpus + gathered + layers * model.hidden * tokens
