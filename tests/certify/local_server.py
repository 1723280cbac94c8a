"""A small HTTP server that speaks SGLang's and OpenAI's protocols, the embedded engine behind it.

For what real servers rarely do: refuse, drop, stay silent, leave things out. That the protocols are right is for the
tests with real servers to say (tests/integration/sglang).
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from aiohttp import web

from bebop.config.job import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import Completion, SamplingParams

Reply = dict[str, Any]
KEY = "for-this-test"


class LocalServer:
    """Its ``url``; ``calls`` that were made. What it does wrong is set by attributes."""

    def __init__(self, policy: Policy, *, key: str | None = None, system: str = "autoregressive", drafts: int = 0):
        self.policy, self.key = policy, key
        self.engine = TorchEngine(policy, DecodingConfig(system=system, draft_tokens=drafts), slots=4, max_length=64)
        self.info: Reply = {"version": "0.5.23", "speculative_algorithm": None, "dtype": "float32"}
        self.models = ["tiny"]
        self.calls: list[tuple[str, Reply]] = []
        self.kept = False  # whether a client wanted to use its connection again
        self.busy = 0  # calls that are refused with 503 first
        self.silent = 0.0  # seconds before an answer
        self.edit: Callable[[str, Reply], Any] = lambda name, reply: reply  # the last word on a reply
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        """Any call."""
        name = request.path.strip("/")
        payload = await request.json() if request.can_read_body else {}
        self.calls.append((name, payload))
        self.kept |= request.keep_alive
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.busy:
            self.busy -= 1
            return web.json_response({}, status=503)
        asked = getattr(self, name.replace("/", "_"), None)
        if asked is None:
            return web.Response(status=404)
        reply = asked(payload)
        if self.silent and payload.get("sampling_params", {}).get("max_new_tokens"):
            await asyncio.sleep(self.silent)
        reply = self.edit(name, reply)
        if isinstance(reply, web.Response):
            return reply
        refused = isinstance(reply, dict) and "error" in reply
        return web.json_response(reply, status=400 if refused else 200)

    def server_info(self, _: Reply) -> Reply:
        return self.info

    def model_info(self, _: Reply) -> Reply:
        return {"weight_version": "default"}

    def abort_request(self, _: Reply) -> Reply:
        return {}

    def v1_models(self, _: Reply) -> Reply:
        return {"data": [{"id": name, "owned_by": "tests", "max_model_len": 64} for name in self.models]}

    def generate(self, payload: Reply) -> Reply:
        params, ids = payload["sampling_params"], payload["input_ids"]
        if "logit_bias" in params:
            last = self.policy.vocab_size - 1
            return {"error": {"message": f"logit_bias must has keys in [0, {last}], got 2000000000."}}
        if params["max_new_tokens"] == 0:
            start, top = payload["logprob_start_len"], payload["top_logprobs_num"]
            rows = self.rows(ids)[start : len(ids) - 1]
            given = [[[value, token, None] for token, value in _top(row, top)] for row in rows]
            own = [[float(row[token]), token, None] for row, token in zip(rows, ids[start + 1 :], strict=True)]
            inputs = {"input_token_logprobs": [[None, ids[start], None], *own], "input_top_logprobs": [None, *given]}
            return {"output_ids": [], "meta_info": inputs}
        found = self.answer(ids, params, params["max_new_tokens"], params["stop_token_ids"])
        logprobs = [[float(p), int(t), None] for p, t in zip(found.logprobs, found.token_ids, strict=True)]
        meta: Reply = {"finish_reason": {"type": found.finish_reason}, "weight_version": "default"}
        meta |= {"output_token_logprobs": logprobs, "completion_tokens": len(logprobs)}
        return {"output_ids": found.token_ids.tolist(), "meta_info": meta}

    def v1_completions(self, payload: Reply) -> Reply:
        ids = payload["prompt"]
        if top := payload.get("prompt_logprobs"):
            rows = [
                [*_top(row, top), (ids[i + 1], float(row[ids[i + 1]]))] for i, row in enumerate(self.rows(ids)[:-1])
            ]
            given = [None, *({str(token): {"logprob": value} for token, value in row} for row in rows)]
            return {"choices": [{"text": "", "prompt_logprobs": given}]}
        found = self.answer(ids, payload, payload["max_tokens"], payload["stop_token_ids"])
        words = [f"token_id:{token}" for token in found.token_ids.tolist()]
        logprobs = {"tokens": words, "token_logprobs": found.logprobs.tolist()}
        choice = {"logprobs": logprobs, "finish_reason": found.finish_reason, "token_ids": found.token_ids.tolist()}
        return {"choices": [choice]}

    def answer(self, ids: list[int], params: Reply, longest: int, stops: list[int]) -> Completion:
        """One answer of the embedded engine, seeded by how many calls there were."""
        sampling = SamplingParams(
            temperature=params["temperature"], top_k=max(params["top_k"], 0), top_p=params["top_p"],
            min_p=params["min_p"], repetition_penalty=params.get("repetition_penalty", 1.0), max_new_tokens=longest,
            stop_token_ids=tuple(stops), seed=params.get("seed", len(self.calls)),
        )  # fmt: skip
        return generate(self.engine, [Request(id=0, token_ids=tuple(ids), params=sampling)])[0]

    @torch.no_grad()
    def rows(self, ids: list[int]) -> torch.Tensor:
        """log softmax [L, V] after each token."""
        from bebop.model.parity import stock_attention

        with stock_attention(self.policy.backbone, "sdpa"):
            return self.policy.backbone(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def _top(row: torch.Tensor, count: int) -> list[tuple[int, float]]:
    values, ids = row.topk(count)
    return list(zip(ids.tolist(), values.tolist(), strict=True))


@contextmanager
def running(server: LocalServer) -> Iterator[LocalServer]:
    """The server in a thread, at its ``url``."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_route("*", "/{name:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
