"""The embedded engine for certificates: it decodes cohorts of completions and exposes the draws inside verification."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from bebop import __version__
from bebop.certify.answers import Answer
from bebop.certify.declared import Rule, known_rule
from bebop.certify.reference import Progress
from bebop.certify.white_box import TREE, WhiteBox
from bebop.config.certify import CertifyConfig
from bebop.errors import UserError
from bebop.model.checkpoint import find_device, load_policy
from bebop.model.fingerprint import fingerprint
from bebop.rollout.decoding.base import AcceptanceRule, Accepted, Draft, Rows, TargetOutput, takes_logits
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.graphs import CudaRecorder
from bebop.rollout.engine import Finished, Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems import SYSTEMS


def make(config: CertifyConfig) -> "EmbeddedEngine":
    """Return the engine of a configuration, with weights of its own."""
    system, device = SYSTEMS[config.decoding.system], find_device(config.model)
    graphs = config.engine.cuda_graphs
    if graphs and device.type != "cuda":
        raise UserError(f"engine.cuda_graphs=True is not possible on model.device={device.type}: give false, or a GPU")
    policy = load_policy(config.model, need_head=system.head, needs=system.needs, need_draft=system.separate)
    engine = TorchEngine(
        policy,
        config.decoding,
        slots=config.engine.slots,
        max_length=config.max_length,
        measure=False,
        recorder=CudaRecorder() if graphs else None,
    )
    return EmbeddedEngine(engine, white_box=WhiteBox(config.alpha) if config.white_box else None)


class EmbeddedEngine:
    """A ``LiveEngine`` over a ``TorchEngine`` that has no other users."""

    name = "embedded"

    def __init__(self, engine: TorchEngine, *, white_box: WhiteBox | None = None, rule: Rule = "rejection") -> None:
        """Attach the white box if the decoding system uses the common draft-verify cycle.

        Args:
            white_box: observes every cycle's verification; unused for a system with its own cycle.
            rule: the engine's declared rule, which its draws are tested against; block verification is detected by
                itself.
        """
        self.engine = engine
        self.white_box: WhiteBox | None = None
        decoder = engine.decoder
        if white_box is not None and isinstance(decoder, DraftVerify):
            self.white_box = white_box
            decoder.rule = WatchedRule(decoder.rule, white_box, rule)

    @property
    def places_known(self) -> bool:
        """Return whether bets may use a token's place in its cycle.

        Given the text, and that the cycle reached the place, a token has the target's distribution under every exact
        rule. This includes block verification: the probability that at least i drafts stand depends on those i drafts
        alone.
        """
        decoder = self.engine.decoder
        return isinstance(decoder, DraftVerify) and decoder.rule.exact

    def describe(self) -> dict[str, Any]:
        """Return versions, fingerprints of weights, precision and settings."""
        policy, slots = self.engine.policy, self.engine.slots.sizes
        return {
            "bebop": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "architecture": type(policy.backbone).__name__,
            "dtype": str(policy.backbone.dtype).removeprefix("torch."),
            "device": policy.device.type,
            "vocabulary": policy.vocab_size,
            "target": fingerprint(dict(policy.backbone.named_parameters())),
            "head": policy.head_fingerprint() or None,
            "weight version": self.engine.version,
            "decoding": asdict(self.engine.decoding),
            "slots": slots.slots,
            "max_length": slots.length,
            "looked inside": self.white_box is not None,
            "cuda graphs": isinstance(self.engine.decoder, DraftVerify) and self.engine.decoder.graphs is not None,
        }

    def sample(self, requests: Sequence[Request], progress: Progress) -> list[Answer]:
        """Decode a cohort as one batch; return an ``Answer`` for each request, in their order."""
        done: dict[int, Finished] = {}
        cycles: dict[int, list[int]] = {request.id: [] for request in requests}
        try:
            for request in requests:
                self.engine.add(request)
            while self.engine.unfinished:
                finished = self.engine.step()
                done |= {one.id: one for one in finished}
                progress(self._note(cycles, finished))
        except KeyboardInterrupt:
            stopped = self.engine.abort()
            done |= {one.id: one for one in stopped}
            self._note(cycles, stopped)
        return [self._answer(request, done.get(request.id), cycles[request.id]) for request in requests]

    def close(self) -> None:
        """Do nothing: the engine needs no cleanup."""

    def _note(self, cycles: dict[int, list[int]], finished: Sequence[Finished]) -> int:
        """Append each request's new tokens to its known cycles; return the number of new tokens of all requests."""
        counts = self.engine.slots.count[: len(self.engine.active)].tolist()
        lengths = {one.id: len(one.completion.token_ids) for one in finished}
        lengths |= {request.id: count for request, count in zip(self.engine.active, counts, strict=True)}
        given = {id: length - sum(cycles[id]) for id, length in lengths.items()}
        for id, tokens in given.items():
            if tokens:
                cycles[id].append(tokens)
        return sum(given.values())

    def _answer(self, request: Request, finished: Finished | None, cycles: Sequence[int]) -> Answer:
        asked = request.params
        known: dict[str, Any] = {"token_ids": np.zeros(0, dtype=np.int64), "finish_reason": "abort"}
        if finished is not None:
            given = finished.completion
            kept, tested = (int(counts.sum()) for counts in (given.stats.accepted, given.stats.reached))
            known = {
                "token_ids": given.token_ids.astype(np.int64),
                "logprobs": given.logprobs.astype(np.float64),
                "finish_reason": given.finish_reason,
                "cycles": tuple(cycles) if self.places_known else None,
                "versions": given.versions.astype(np.int64),
                "accepted": (kept, tested) if tested else None,
            }
        return Answer(
            request=request.id,
            prompt=request.token_ids,
            seed=asked.seed,
            stops=asked.stop_token_ids,
            limit=asked.max_new_tokens,
            **known,
        )


@takes_logits
class WatchedRule:
    """An acceptance rule that reports its inputs and decisions to a white box.

    The inner rule verifies as it would in a job, so where it works on logits, the white box gets their probabilities.
    """

    def __init__(self, inner: AcceptanceRule, box: WhiteBox, rule: Rule = "rejection") -> None:
        self.inner, self.box, self.one_hot = inner, box, known_rule(rule) == "one_hot"
        self.exact, self.stepwise, self.layers, self.counts = inner.exact, inner.stepwise, inner.layers, inner.counts

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """Verify as the inner rule does, and report the outcome to the white box."""
        accepted = self.inner.accept(rows, draft, out, uniforms)
        if not self.exact:
            self.box.skip(rows.batch, "draws of an inexact rule", "it claims no distribution to hold them to")
        elif draft.parents is not None:
            self.box.skip(rows.batch, *TREE)
        else:
            self.box.update(
                draft.tokens,
                draft.probs if draft.rows is None else torch.cat([one.probs() for one in draft.rows], 1),
                out.probs if out.rows is None else out.rows.probs(),
                accepted.lengths,
                accepted.tokens.gather(1, accepted.lengths[:, None])[:, 0],
                draft.lengths,
                sorted({id for id in rows.slots.stops[: rows.batch].flatten().tolist() if id >= 0}),
                self.stepwise,
                self.one_hot,
            )
        return accepted
