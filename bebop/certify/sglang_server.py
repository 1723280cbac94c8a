"""A running SGLang server as a client sees it: bebop aborts only its own requests, and changes no weights.

SGLang's own end tokens end completions as well as those that are asked for: they belong to the stops. With
deterministic inference a completion has a seed of its own; otherwise one generator of the server draws for all.

A server that gets a token id, or a number of likeliest tokens, beyond its vocabulary dies (0.5.23). So the size is
requested first, by a bias on a token that no model has, which the server refuses before it computes anything.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from bebop import __version__
from bebop.certify.answers import Answer
from bebop.certify.calls import Server, fields, refuse, unanswered
from bebop.certify.reference import Progress
from bebop.certify.served_reference import Prefilled, likeliest
from bebop.certify.white_box import WhiteBox
from bebop.config.certify import CertifyConfig
from bebop.errors import UserError
from bebop.rollout.engine import Request
from bebop.rollout.sglang.arguments import refuse_version, sampling_arguments
from bebop.rollout.sglang.certify import ENTRY, STATE, name
from bebop.rollout.sglang.outputs import by_role, request_stats
from bebop.trajectory import SamplingParams

# Reported settings of a server: all that decide the distribution it samples from, and the method.
SETTINGS = (
    "version", "model_path", "served_model_name", "dtype", "quantization", "kv_cache_dtype", "tp_size", "dp_size",
    "device", "attention_backend", "sampling_backend", "disable_radix_cache", "enable_deterministic_inference",
    "random_seed", "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_use_rejection_sampling",
    "speculative_use_block_verification", "speculative_accept_threshold_single", "speculative_accept_threshold_acc",
    "speculative_adaptive",
)  # fmt: skip
NO_TOKEN = 2_000_000_000  # an id that no model has


def make(config: CertifyConfig) -> "SglangEngine":
    """Connect to the server; raise ``UserError`` if it is unreachable or unsuitable."""
    own = config.engine
    assert own.url is not None
    key = os.environ.get(own.api_key_env)
    server = Server(own.url, key=key, key_name=own.api_key_env, timeout=own.timeout)
    try:
        return SglangEngine(server, look_inside=config.white_box)
    except BaseException:
        server.close()
        raise


class SglangEngine:
    """A ``LiveEngine`` over a running SGLang server."""

    name = "sglang"
    most = None  # see ``Prefilling``

    def __init__(self, server: Server, *, look_inside: bool = True) -> None:
        """Connect to the server and read its settings, vocabulary size and weight checksums.

        ``look_inside``: use the plugin's white box where the server has one (``BEBOP_CERTIFY=1``).
        """
        self.server = server
        self.run = uuid4().hex[:12]  # requests of this run have it in their names
        self.info = self._meet()
        self.vocabulary = server.run(self._vocabulary())
        self.versions: dict[str, int] = {}  # names of weight versions that are no numbers, in order of appearance
        self.sums = self._checksums()
        self.white_box: WhiteBox | None = None
        self._count = 0
        self._running: set[str] = set()
        one = int(self.info.get("dp_size") or 1) == 1  # each replica would have a box of its own
        if look_inside and one and self.drafts:
            self._look()

    @property
    def drafts(self) -> int:
        """Return the drafts per cycle; 0 for plain decoding."""
        if self.info.get("speculative_algorithm") is None:
            return 0
        return int(self.info.get("speculative_num_draft_tokens") or 1) - 1

    @property
    def seeded(self) -> bool:
        """Return whether completions have seeds of their own."""
        return bool(self.info.get("enable_deterministic_inference"))

    def describe(self) -> dict[str, Any]:
        """Return settings, versions and ``weights``: a hash over the checksums of each role, target and draft."""
        model = self.server.run(self.server.get("model_info")) or {}
        said = {name: self.info[name] for name in SETTINGS if self.info.get(name) is not None}
        return said | {
            "url": self.server.url,
            "vocabulary": self.vocabulary,
            "weight_version": model.get("weight_version"),
            "weight_versions_seen": self.versions or None,
            "weights": self.sums,
            "seeds": "a completion's own" if self.seeded else "one generator for all completions",
        }

    def sample(self, requests: Sequence[Request], progress: Progress) -> list[Answer]:
        """Sample a cohort with concurrent requests; return an ``Answer`` for each request, in their order."""
        for request in requests:
            refuse(request, self.vocabulary)
        replies = self.server.together([self._answer(request, progress) for request in requests], self._end)
        if None in replies:  # interrupted: short completions alone would have come, which is a choice by their tokens
            replies = [None] * len(requests)
        answers = [self._read(request, reply) for request, reply in zip(requests, replies, strict=True)]
        if self.white_box is not None:
            self._look()
        return answers

    def prefilled(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], top: int) -> list[Prefilled]:
        """Return the ``top`` likeliest tokens at every position of each (prompt, completion) pair."""
        top = min(top, self.vocabulary)
        found = self.server.together([self._prefill(prompt, answer, top) for prompt, answer in pairs])
        if any(one is None for one in found):
            raise KeyboardInterrupt
        return [one for one in found if one is not None]

    def close(self) -> None:
        """Close the connections; the server keeps running."""
        self.server.close()

    # ---- properties of the server

    def _meet(self) -> dict[str, Any]:
        info = self.server.run(self.server.get("server_info"))
        if not isinstance(info, dict) or "version" not in info:
            raise UserError(f"{self.server.url} has no /server_info: it is no SGLang server of 0.5.14 or newer")
        refuse_version(str(info["version"]))
        return info

    async def _vocabulary(self) -> int:
        """Return the vocabulary size, parsed from the server's refusal of a token that no model has."""
        params = {"max_new_tokens": 1, "logit_bias": {str(NO_TOKEN): 0.0}}
        try:
            await self.server.ask("POST", "generate", {"input_ids": [0], "sampling_params": params}, again=True)
        except UserError as refusal:
            if size := re.search(r"\[0, (\d+)\]", str(refusal)):
                return int(size[1]) + 1
            raise
        raise UserError(f"{self.server.url} does not say how large its vocabulary is: use engine.name=openai")

    def _checksums(self) -> dict[str, str] | None:
        """Return a hash of each role's weights; None if the server does not reveal them. The call changes nothing."""
        asked = self.server.ask("POST", "weights_checker", {"action": "checksum", "selector": "all"}, again=True)
        try:
            reply = self.server.run(asked)
        except UserError:  # an administrator's key is needed, or there is no such call
            return None
        roles = by_role(reply or {})
        return {role: _digest(sums) for role, sums in roles.items() if sums} or None

    def _look(self) -> None:
        """Fetch the plugin's white box of this run; without a plugin there is none."""
        meta = self.server.run(self._state())["meta_info"]
        states = [entry["state"] for entry in meta.get(ENTRY) or [] if entry and entry.get("state")]
        if states:
            state = json.loads(states[-1])
            if state["bebop"] != __version__:
                raise UserError(
                    f"{self.server.url} has the plugin of bebop {state['bebop']}, this is {__version__}: install the "
                    "same beside SGLang, or set white_box=false"
                )
            self.white_box = WhiteBox()
            self.white_box.load_state_dict(state["box"])

    async def _state(self) -> Any:
        params = sampling_arguments(SamplingParams(max_new_tokens=2 + self.drafts), 2 + self.drafts, self.seeded)
        payload = {"input_ids": [0, 0], "rid": name(self.run, f"{STATE}{self._next()}"), "sampling_params": params}
        return await self.server.ask("POST", "generate", payload, again=True)

    # ---- completions

    def _next(self) -> int:
        self._count += 1
        return self._count

    async def _answer(self, request: Request, progress: Progress) -> Any:
        rid = name(self.run, str(self._next()))
        params = sampling_arguments(request.params, request.params.max_new_tokens, self.seeded)
        if request.params.repetition_penalty != 1.0:
            params["repetition_penalty"] = request.params.repetition_penalty
        payload = {
            "rid": rid,
            "input_ids": list(request.token_ids),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        self._running.add(rid)
        try:
            reply = await self.server.ask("POST", "generate", payload, again=False)
        finally:
            self._running.discard(rid)
        if reply is None:
            raise UserError(f"{self.server.url} has no /generate: it is no SGLang server")
        progress(len(reply.get("output_ids") or ()))
        return reply

    async def _end(self) -> None:
        """Abort our own requests, each by its name."""
        for rid in list(self._running):
            await self.server.ask("POST", "abort_request", {"rid": rid}, again=True)

    def _read(self, request: Request, reply: Mapping[str, Any] | None) -> Answer:
        if reply is None:
            return unanswered(request)
        meta, ids = reply["meta_info"], np.asarray(reply["output_ids"], dtype=np.int64)
        stats = request_stats(meta, len(ids), self.drafts)
        return Answer(
            **fields(request),
            token_ids=ids,
            logprobs=logprobs(meta, ids, self.server.url),
            finish_reason=str((meta.get("finish_reason") or {}).get("type")),
            seed=request.params.seed % (1 << 31) if self.seeded else None,
            cycles=cycles(meta, len(ids)),
            versions=self._versions(meta, len(ids)),
            accepted=(int(stats.accepted.sum()), int(stats.reached.sum())) if self.drafts else None,
        )

    def _versions(self, meta: Mapping[str, Any], count: int) -> NDArray[np.int64]:
        """Return the weight version of each token; names that are no numbers are numbered from 0."""
        spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0}]
        found = np.zeros(count, dtype=np.int64)
        for span in spans:
            version = str(span["version"])
            number = int(version) if version.isdigit() else self.versions.setdefault(version, len(self.versions))
            found[span["start"] :] = number
        return found

    async def _prefill(self, prompt: Sequence[int], answer: Sequence[int], top: int) -> Prefilled:
        """Request a prefill that reuses no cached keys and values: a new ``extra_key`` gives it its own cache."""
        before = min(len(prompt), 2)  # the row before the first token needs one more
        payload = {
            "input_ids": [*prompt, *answer],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(prompt) - before,
            "top_logprobs_num": top,
            "extra_key": uuid4().hex,
        }
        reply = await self.server.ask("POST", "generate", payload, again=True)
        meta = (reply or {}).get("meta_info") or {}
        own, rows = meta.get("input_token_logprobs") or [], meta.get("input_top_logprobs") or []
        wanted = len(answer) + before
        if len(own) != wanted or len(rows) != wanted or any(row is None for row in rows[1:]):
            raise UserError(
                f"{self.server.url} gave prefill log-probs of {len(rows)} positions where {wanted} were asked for: "
                "use reference=model"
            )
        return likeliest(
            [[(int(token), value) for value, token, *_ in row] for row in rows[1:]],
            [value for value, *_ in own[before:]],
            leading=before - 1,
            top=top,
        )


def logprobs(meta: Mapping[str, Any], ids: NDArray[np.int64], url: str) -> NDArray[np.float64]:
    """Return the log-probs of the tokens [T]; raise ``UserError`` if they are missing or belong to other tokens."""
    rows = (meta.get("output_token_logprobs") or [])[: len(ids)]
    if [row[1] for row in rows] != ids.tolist():
        raise UserError(f"{url} gives log-probs of {len(rows)} other tokens with a completion of {len(ids)}")
    return np.array([row[0] for row in rows], dtype=np.float64)


def cycles(meta: Mapping[str, Any], count: int) -> tuple[int, ...] | None:
    """Return the number of tokens of each cycle, cut at the end of the completion.

    The first token comes from the prefill and is a cycle of its own. The result is None without the plugin, or if the
    request was retracted.
    """
    entries = meta.get(ENTRY)
    if entries is None or not count or meta.get("num_retractions"):
        return None
    sizes = [1, *(int(entry["accepted"]) + 1 for entry in entries if entry)]  # null: no cycle, of an aborted one
    ends = [min(end, count) for end in accumulate(sizes)]
    found = tuple(end - start for start, end in zip([0, *ends], ends, strict=False) if end > start)
    return found if sum(found) == count else None


def _digest(sums: Mapping[str, str]) -> str:
    text = "\n".join(f"{name} {value}" for name, value in sorted(sums.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
