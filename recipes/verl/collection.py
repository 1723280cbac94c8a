"""Statistics of every answer, whatever verl does to it on the way: resumed after an abort, or of several turns.

Each turn of an agent loop is a request of its own, and an aborted one goes on with the next piece.

``note_answers`` works where a piece of an answer arrives from a server, ``sum_answers`` where it is finished.
"""

from types import ModuleType
from typing import Any

from bebop.verl_job.hooks import wrap
from bebop.verl_job.stats import ABORTED, COLLECTED, note, unpack, whole


def note_answers(llm_server: ModuleType) -> None:
    """Every piece passes ``LLMServerClient.generate``, in the asynchronous modes too: their client calls it."""

    async def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        output = await original(*args, **kwargs)
        unpack(output.extra_fields)
        note(output.extra_fields, getattr(output, "stop_reason", None) in ABORTED)
        return output

    wrap(llm_server.LLMServerClient, "generate", around)


def sum_answers(agent_loop: ModuleType) -> None:
    """One task runs one agent loop; its statistics are put into the answer just before verl stores it."""
    worker = agent_loop.AgentLoopWorker

    async def collecting(original: Any, *args: Any, **kwargs: Any) -> Any:
        token = COLLECTED.set([])
        try:
            return await original(*args, **kwargs)
        finally:
            COLLECTED.reset(token)

    async def storing(original: Any, self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        collected = COLLECTED.get()
        if collected:
            outputs[-1].extra_fields.update(whole(collected))
        return await original(self, outputs, *args, **kwargs)

    wrap(worker, "_run_agent_loop", collecting)
    wrap(worker, "_compute_score", storing)  # the first thing that is done with a finished answer, in every worker
