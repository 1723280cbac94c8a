"""Live embedded engines with one planted fault. Each fault has a hook of its own: nothing of the engine is patched."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from bebop.certify.answers import Answer
from bebop.certify.embedded import EmbeddedEngine
from bebop.certify.reference import Progress
from bebop.certify.white_box import WhiteBox
from bebop.config.job import DecodingConfig, ModelConfig
from bebop.kernels.verify import sample
from bebop.model.attention import SlotContext
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.rollout.decoding.base import Draft, DraftLength, Rows
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.mtp import MTPDrafter
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from recipes.reproduce.certificate.verification import RULES, FaultyRule

DRAFTS, SLOTS, LENGTH = 3, 16, 512
DECODING = DecodingConfig(system="bebop", draft_tokens=DRAFTS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A planted fault: Planted(kind="bonus row", size=0.1).

    ``size`` is its strength, or the share of rows, tokens or requests that it hits.
    """

    kind: str = "none"
    size: float = 1.0
    heat: float = 1.0  # the requested temperature


@cache
def trusted() -> Policy:
    """Load the intact built-in model in fp32; the cached object must not be changed."""
    return load_policy(ModelConfig(path="tiny", device="cpu"), need_head=True)


def live(planted: Planted, seed: int, *, inside: bool = False) -> EmbeddedEngine:
    """Return an engine with a fault; ``inside`` adds a white box, which sees what the faulty parts did."""
    policy = (
        WEIGHTS[planted.kind](copy.deepcopy(trusted()), planted.size, seed) if planted.kind in WEIGHTS else trusted()
    )
    # ``StaleCache`` needs a slot cache, not a paged one.
    engine = TorchEngine(policy, DECODING, slots=SLOTS, max_length=LENGTH, measure=False, paged=False)
    decoder = engine.decoder
    assert isinstance(decoder, DraftVerify)
    if planted.kind in RULES:
        decoder.rule = FaultyRule(planted.kind, planted.size, planted.heat, seed)
    if planted.kind in DRAWS:
        drafter = FaultyDrafter(engine, planted.kind, planted.size, seed)
        decoder.drafter = drafter
        decoder.drafters = {"mtp": drafter}
    if planted.kind == "stale cache":
        stale = StaleCache.for_model(
            policy.backbone.config, SLOTS, engine.slots.capacity, policy.embed(torch.tensor([0]))
        )
        stale.share, stale.numbers = planted.size, torch.Generator().manual_seed(seed)
        engine.slots.caches["target"] = decoder.target.cache = stale
    return FaultyClient(engine, planted, seed, WhiteBox() if inside else None)


# ---- weights


def _off(policy: Policy, size: float, seed: int) -> Policy:
    """Move every weight of the target up or down by ``size``, as if an update of Adam were missing."""
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.backbone.parameters():
            weight += size * torch.randn(weight.shape, generator=numbers).sign().to(weight.dtype)
    return policy


def _zeroed(policy: Policy, size: float, seed: int) -> Policy:
    """Set all weights of the head to 0."""
    assert policy.mtp is not None
    with torch.no_grad():
        for weight in policy.mtp.parameters():
            weight.zero_()
    return policy


def _stale(policy: Policy, size: float, seed: int) -> Policy:
    """Make the head resemble one of another model: add noise of ``size`` times its own spread to every matrix."""
    assert policy.mtp is not None
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.mtp.parameters():
            if weight.dim() == 2:
                weight += size * weight.std() * torch.randn(weight.shape, generator=numbers).to(weight.dtype)
    return policy


WEIGHTS: Mapping[str, Callable[[Policy, float, int], Policy]] = {
    "weights off": _off,
    "zeroed head": _zeroed,
    "stale head": _stale,
}


# ---- drafts


def _hotter(q: Tensor, u: Tensor, size: float, struck: Tensor, stops: Tensor) -> Tensor:
    """Draw drafts at a temperature that is higher by the factor 1 + size."""
    return sample(q ** (1 / (1 + size)), u)


def _argmax(q: Tensor, u: Tensor, size: float, struck: Tensor, stops: Tensor) -> Tensor:
    """Use the likeliest token in the struck rows."""
    return torch.where(struck, q.argmax(-1), sample(q, u))


def _no_stops(q: Tensor, u: Tensor, size: float, struck: Tensor, stops: Tensor) -> Tensor:
    """Never draw a stop token in the struck rows."""
    return torch.where(struck, sample(q.index_fill(-1, stops, 0.0), u), sample(q, u))


DRAWS: Mapping[str, Callable[[Tensor, Tensor, float, Tensor, Tensor], Tensor]] = {
    "drafts hotter": _hotter,
    "argmax as sampled": _argmax,
    "stops filtered": _no_stops,
}


class FaultyDrafter(MTPDrafter):
    """A drafter that draws drafts from another distribution than the one it records."""

    def __init__(self, engine: TorchEngine, kind: str, size: float, seed: int) -> None:
        super().__init__(engine.policy, engine.slots, engine.decoding)
        self.draw, self.size = DRAWS[kind], size
        self.numbers = torch.Generator().manual_seed(seed)
        self.stops = torch.tensor(engine.policy.eos_token_ids)

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """Propose a chain of K drafts with the fault; see ``Drafter``."""
        hidden = self.hidden[: rows.batch]
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(length.limit):
            q = rows.probs(self.policy.logits(hidden)[:, None])[:, 0]
            struck = torch.rand(rows.batch, generator=self.numbers) < self.size
            tokens.append(self.draw(q, rows.uniforms[:, step], self.size, struck, self.stops))
            probs.append(q)
            if step + 1 < length.limit:
                hidden = self.step(rows, step, tokens[-1], hidden)
        return Draft(tokens=torch.stack(tokens, 1), probs=torch.stack(probs, 1), forwards=len(tokens))


# ---- caches


class StaleCache(SlotContext):
    """A KV cache whose rollback fails in a share of cycles.

    In those, the first token of a verification finds the key and value of the draft that was rejected at its place, and
    leaves them there.
    """

    share: float
    numbers: torch.Generator

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend, with stale first entries in the struck rows of a verification; see ``AttentionContext``."""
        if self.verifying(key):
            if layer == 0:
                self.struck = torch.rand(len(key), generator=self.numbers) < self.share
            first = self.entries[:, None, :1, None].expand(len(key), key.shape[1], 1, key.shape[3])
            old = [store.gather(2, first) for store in self.held(layer, len(key))]
            mask = self.struck[:, None, None, None]
            key, value = (
                torch.cat([torch.where(mask, before, now[:, :, :1]), now[:, :, 1:]], 2)
                for before, now in zip(old, (key, value), strict=True)
            )
        return super().attend(layer, query, key, value, scaling)

    def verifying(self, key: Tensor) -> bool:
        """Return whether this is the pass over the newest token and its drafts."""
        return self.first_slot == 0 and key.shape[2] == DRAFTS + 1


# ---- requests and reports


class FaultyClient(EmbeddedEngine):
    """An engine whose front end alters requests, or what it reports of completions."""

    def __init__(self, engine: TorchEngine, planted: Planted, seed: int, white_box: WhiteBox | None) -> None:
        super().__init__(engine, white_box=white_box)
        self.planted, self.numbers = planted, np.random.default_rng(seed)

    def sample(self, requests: Sequence[Request], progress: Progress) -> list[Answer]:
        """Sample completions of altered requests and alter their report; see ``LiveEngine``."""
        answers = super().sample([self._asked(request) for request in requests], progress)
        seeds = [request.params.seed for request in requests]
        return [dataclasses.replace(self._told(a), seed=seed) for a, seed in zip(answers, seeds, strict=True)]

    def _asked(self, request: Request) -> Request:
        params, kind, size = request.params, self.planted.kind, self.planted.size
        if kind == "temperature off":
            params = dataclasses.replace(params, temperature=params.temperature * (1 + size))
        if kind == "shared seeds" and request.id % 2 and self.numbers.random() < size:
            # Half of them share a seed with the request of the same prompt, half with one of another prompt.
            params = dataclasses.replace(params, seed=params.seed - (1 if request.id % 4 == 1 else 2))
        return dataclasses.replace(request, params=params)

    def _told(self, answer: Answer) -> Answer:
        """Give a share of tokens the log-prob of the token before."""
        if self.planted.kind != "wrong log-probs" or answer.logprobs is None or not len(answer.logprobs):
            return answer
        struck = self.numbers.random(len(answer.logprobs)) < self.planted.size
        return dataclasses.replace(answer, logprobs=np.where(struck, np.roll(answer.logprobs, 1), answer.logprobs))
