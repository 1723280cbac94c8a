"""SGLang's own draft statistics from ``meta_info``, read where verl reads them, under all their names so far.

verl 0.9 looks for names that SGLang no longer uses, so it always reports a rate of 0 and a length of 1.
"""

from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from bebop.monitor.adapters import PROPOSED
from bebop.rollout.sglang.outputs import request_stats
from bebop.verl_job.hooks import wrap
from bebop.verl_job.stats import fields

SEEN: ContextVar[list[Mapping[str, Any]] | None] = ContextVar("bebop_meta_info", default=None)


def spec_fields(meta: Mapping[str, Any], drafts: int) -> dict[str, Any]:
    """Return ``extra_fields`` of one output, empty if nothing was verified; raise ``UserError`` if it is unreadable."""
    stats = request_stats(meta, int(meta.get("completion_tokens") or 0), drafts)
    if not stats.cycles:
        return {}
    proposed = next((int(meta[name]) for name in PROPOSED if meta.get(name) is not None), stats.cycles * drafts)
    return fields(stats, drafts) | {"spec_num_draft_tokens": proposed}


async def recording(original: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Wrap ``TokenizerManager.generate_request``: record ``meta_info`` for the task that sent the request."""
    async for output in original(*args, **kwargs):
        seen = SEEN.get()
        if seen is not None:
            seen.append(output.get("meta_info") or {})
        yield output


def read_meta_info(server: ModuleType) -> None:
    """Hook verl's SGLang server, so that it adds draft statistics to each output."""

    async def launch(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = await original(self, *args, **kwargs)
        if getattr(self, "tokenizer_manager", None) is not None:
            wrap(self.tokenizer_manager, "generate_request", recording)
        return result

    async def generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        mtp = self.config.mtp
        if mtp is None or not (mtp.enable and mtp.enable_rollout):
            return await original(self, *args, **kwargs)
        token = SEEN.set([])
        try:
            output = await original(self, *args, **kwargs)
            for meta in (SEEN.get() or [])[-1:]:
                output.extra_fields.update(spec_fields(meta, mtp.speculative_num_steps))
        finally:
            SEEN.reset(token)
        return output

    wrap(server.SGLangHttpServer, "launch_server", launch)
    wrap(server.SGLangHttpServer, "generate", generate)
