"""Any server with OpenAI's ``/v1/completions`` that takes and returns token ids: vLLM, SGLang and similar ones.

Servers with ``return_token_ids`` (vLLM 0.10.2, SGLang 0.5.14 and newer) or vLLM's older ``return_tokens_as_token_ids``
return ids. Text alone cannot be certified, since other tokens spell the same text. Prefill log-probs, for
``reference=server``, are vLLM's ``prompt_logprobs``.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.certify.answers import Answer
from bebop.certify.calls import Server, fields, refuse, unanswered
from bebop.certify.reference import Progress
from bebop.certify.served_reference import Prefilled, likeliest
from bebop.config.certify import CertifyConfig
from bebop.errors import UserError
from bebop.rollout.engine import Request

TOKEN_ID = re.compile(r"token_id:(\d+)")


def make(config: CertifyConfig) -> "OpenAIEngine":
    """Connect to the server; raise ``UserError`` if it is unreachable or lacks the model."""
    own = config.engine
    assert own.url is not None
    url = own.url.rstrip("/").removesuffix("/v1")
    server = Server(url, key=os.environ.get(own.api_key_env), key_name=own.api_key_env, timeout=own.timeout)
    try:
        return OpenAIEngine(server, own.model, logprobs=config.logprobs != "none")
    except BaseException:
        server.close()
        raise


class OpenAIEngine:
    """A ``LiveEngine`` over an OpenAI-compatible server, without a white box."""

    name = "openai"
    white_box = None
    most = 20  # largest number of prefill log-probs at a position in vLLM, by default (--max-logprobs)

    def __init__(self, server: Server, model: str | None = None, *, logprobs: bool = True) -> None:
        """Connect to the model.

        Args:
            model: its name at the server; None: the only one.
            logprobs: whether completions must have log-probs.
        """
        self.server, self.logprobs = server, logprobs
        self.model = self._chosen(model)

    def describe(self) -> dict[str, Any]:
        """Return the model's properties and the version, as far as the server reports them."""
        version = self.server.run(self._version())
        known = ("root", "owned_by", "max_model_len")
        said = {name: self.model[name] for name in known if self.model.get(name) is not None}
        return {"url": self.server.url, "model": self.model["id"], "version": version, **said}

    def sample(self, requests: Sequence[Request], progress: Progress) -> list[Answer]:
        """Sample a cohort with concurrent requests; return an ``Answer`` for each request, in their order."""
        for request in requests:
            refuse(request, None)
        found = self.server.together([self._answer(request, progress) for request in requests])
        if None in found:  # interrupted: short completions alone would have come, which is a choice by their tokens
            return [unanswered(request) for request in requests]
        return [answer for answer in found if answer is not None]

    def prefilled(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], top: int) -> list[Prefilled]:
        """Return the ``top`` likeliest tokens at every position of each (prompt, completion) pair."""
        found = self.server.together([self._prefill(prompt, answer, top) for prompt, answer in pairs])
        if any(one is None for one in found):
            raise KeyboardInterrupt
        return [one for one in found if one is not None]

    def close(self) -> None:
        """Close the connections; the server keeps running."""
        self.server.close()

    def _chosen(self, model: str | None) -> Mapping[str, Any]:
        reply = self.server.run(self.server.get("v1/models"))
        if not isinstance(reply, dict) or not reply.get("data"):
            raise UserError(f"{self.server.url} has no /v1/models: it is no OpenAI-compatible server")
        models: list[dict[str, Any]] = reply["data"]
        names = ", ".join(str(one["id"]) for one in models)
        if model is None and len(models) > 1:
            raise UserError(f"{self.server.url} has several models: set engine.model to one of {names}")
        for one in models:
            if model in (None, one["id"]):
                return one
        raise UserError(f"engine.model={model!r} is not at {self.server.url}: it has {names}")

    async def _version(self) -> str | None:
        """Return vLLM's version; None for other servers, which have no such endpoint."""
        try:
            reply = await self.server.get("version")
        except UserError:
            return None
        return reply.get("version") if isinstance(reply, dict) else None

    async def _complete(self, payload: Mapping[str, Any], *, again: bool) -> Mapping[str, Any]:
        reply = await self.server.ask("POST", "v1/completions", {"model": self.model["id"], **payload}, again=again)
        if not isinstance(reply, dict) or not reply.get("choices"):
            raise UserError(f"{self.server.url} has no /v1/completions: it is no OpenAI-compatible server")
        choice: Mapping[str, Any] = reply["choices"][0]
        return choice

    async def _answer(self, request: Request, progress: Progress) -> Answer:
        params = request.params
        payload = {
            "prompt": list(request.token_ids),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "seed": params.seed % (1 << 31),
            "logprobs": 1,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": not params.stop_token_ids,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        choice = await self._complete(payload, again=False)
        ids = token_ids(choice, self.server.url)
        progress(len(ids))
        return Answer(
            **fields(request),
            token_ids=ids,
            logprobs=self._logprobs(choice),
            finish_reason=str(choice.get("finish_reason")),
            seed=params.seed % (1 << 31),
        )

    def _logprobs(self, choice: Mapping[str, Any]) -> NDArray[np.float64] | None:
        """Return log-probs, nan where one is missing, or None if they are not required.

        Raises:
            UserError: Log-probs are required, but the server returned none.
        """
        given = (choice.get("logprobs") or {}).get("token_logprobs")
        if not self.logprobs:
            return None
        if given is None:
            raise UserError(f"{self.server.url} gives no log-probs: set logprobs=none, or have it started with them")
        return np.array([np.nan if value is None else value for value in given], dtype=np.float64)

    async def _prefill(self, prompt: Sequence[int], answer: Sequence[int], top: int) -> Prefilled:
        ids = [*prompt, *answer]
        payload = {"prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top}
        choice = await self._complete(payload, again=True)
        rows = choice.get("prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(ids):
            raise UserError(
                f"{self.server.url} gives no prompt_logprobs, which reference=server needs: use reference=model, or "
                "engine.name=sglang for an SGLang server"
            )
        leading = min(len(prompt), 2) - 1  # the first token of a text has no row
        named = [[(int(token), float(one["logprob"])) for token, one in row.items()] for row in rows[1:]]
        own = [dict(row)[token] for row, token in zip(named, ids[1:], strict=True)]
        # vLLM lists the text's own token beside the likeliest ones. If it is none of them, it may not become a column:
        # columns depend on the text before alone.
        listed = [
            [pair for pair in row if len(row) <= top or pair[0] != token]
            for row, token in zip(named, ids[1:], strict=True)
        ]
        first = len(prompt) - 1  # row of the first token of the completion
        return likeliest(listed[first - leading :], own[first:], leading=leading, top=top)


def token_ids(choice: Mapping[str, Any], url: str) -> NDArray[np.int64]:
    """Return the ids of a completion [T] from either format; raise ``UserError`` if the server has neither."""
    given = choice.get("token_ids")
    if given is None:
        words = [TOKEN_ID.fullmatch(str(word)) for word in (choice.get("logprobs") or {}).get("tokens") or ()]
        if not words or not all(words):
            raise UserError(
                f"{url} gives text without token ids, which cannot be certified: it needs return_token_ids (vLLM "
                "0.10.2, SGLang 0.5.14 or newer) or return_tokens_as_token_ids"
            )
        given = [int(word[1]) for word in words if word]
    return np.asarray(given, dtype=np.int64)
