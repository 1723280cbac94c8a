"""Cycles as CUDA graphs: a cycle is recorded once for each plan and then launched as one.

A cycle of a small model is more than a thousand kernels of a few microseconds each, and the host takes longer to launch
them than the device to run them. A graph holds these launches with the addresses of their tensors. So a body may
neither read the device nor use anything of the host but its plan (``DraftVerify.body``).

- *Buckets.* A graph has fixed numbers of rows and entries, so both are rounded up. Rows beyond the batch are dead: they
  have no room and emit nothing (``Slots.retire``). Entries beyond a row's own are masked, as they always are.
- *The first cycle of a plan runs unrecorded*, on its padded batch: it compiles kernels and fills buffers that are made
  once. The second one is recorded and launched. So no cycle is run for nothing.
- *One memory pool* serves all graphs, as one runs at a time. The log has its size for the first graph, and each time
  that the number of graphs has doubled.
- *Half a cycle* is captured for a system whose drafting or learning reads the device, such as drafts from history. Its
  drafts are copied into tensors at fixed addresses (``StagedDrafts``). The graph holds the target's pass, the rule and
  the statistics.
- *Nothing is captured* for a system whose rule or pass reads the device, for rows that are traced, or while another
  observer watches. Such cycles run as without graphs, and the log has one line for each reason.

Rows of a batch are computed in the shapes of their bucket. cuBLAS chooses its kernel by these shapes. So on a GPU the
rounding of a row depends on how many rows are beside it. ``only_entries`` leaves one bucket for all batches, and cycles
that may not be recorded because somebody watches them are computed in it, too.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.rollout.decoding.base import Draft, Plan, of_tensors
from bebop.rollout.slots import Slots

SHORTEST = 256  # entries that a graph looks at at least: few plans, and masked entries cost little on a GPU
STEP = 32  # rows between two buckets, above which powers of two would leave too many rows dead
MOST = 128  # graphs that are held; the one that was not launched for longest goes
NARROW = (".lengths", ".head")  # parts of a draft without a dimension for its K tokens
Recording = Callable[[], Any]  # replays what was recorded; it returns the same tensors every time
T = TypeVar("T")

log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Turns the body of a cycle into a recording that can be replayed."""

    def record(self, body: Recording) -> Recording:
        """Record the operations of a body, without running them."""
        ...

    def held(self) -> int:
        """Return the bytes that all recordings hold."""
        ...

    def clear(self) -> None:
        """Drop all recordings; none of them is played again."""
        ...


class CudaRecorder:
    """A recorder that captures CUDA graphs."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, body: Recording) -> Recording:
        """Capture a body as a CUDA graph; nothing runs.

        Raises:
            UserError: It does something that a graph cannot hold, or there is no memory for it.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        cause: Exception | None = None  # the first error: the end of a capture that failed has another one
        try:
            # Other threads of this process, such as one that watches a collective, may go on calling CUDA.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                try:
                    outcome = body()
                except Exception as error:
                    cause = error
                    raise
        except Exception as error:
            self._give_up(stream)
            if isinstance(cause, UserError):
                raise cause from None
            reason = " ".join(f"{type(cause or error).__name__}: {cause or error}".split())[:200]
            raise UserError(
                f"a cycle could not be captured: {reason}; rollout.torch.cuda_graphs=false decodes without CUDA graphs"
            ) from error

        def play() -> Any:
            graph.replay()
            return outcome

        return play

    def _give_up(self, stream: torch.cuda.Stream) -> None:
        """Leave a capture that failed, so that a later one can begin: ``torch.cuda.graph`` does not.

        The thread stays on the stream of the capture, and the allocator goes on as if the capture were under way.
        """
        torch.cuda.set_stream(stream)
        end: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
        try:
            if end is not None:
                end(stream.device_index, self.pool)
        except RuntimeError:  # the capture had ended, after all
            pass
        self.clear()

    def held(self) -> int:
        """Return the bytes of the pool; memory that the driver keeps for a graph itself is not known."""
        segments = torch.cuda.memory_snapshot()
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == tuple(self.pool))

    def clear(self) -> None:
        """Use a new pool: the old one cannot be used again while one of its tensors is still held."""
        self.pool = torch.cuda.graph_pool_handle()


class EagerRecorder:
    """A recorder for machines without a GPU: it runs the body again, with the buckets and dead rows of a GPU."""

    def record(self, body: Recording) -> Recording:
        """Return the body itself."""
        return body

    def held(self) -> int:
        """Return 0, since nothing is recorded."""
        return 0

    def clear(self) -> None:
        """Do nothing."""


class Graphs:
    """The recorded cycles of an engine, by plan."""

    def __init__(self, recorder: Recorder, slots: int, only_entries: int | None = None) -> None:
        """Make an empty collection of recordings.

        ``slots`` is the number of slots of the engine, the widest bucket. With ``only_entries`` all cycles are computed
        in one bucket, of all slots and so many entries. Then no row's rounding depends on those beside it, and each
        cycle costs what a cycle of a full engine costs.
        """
        self.recorder, self.slots, self.only_entries = recorder, slots, only_entries
        self.fresh = False  # whether the latest cycle was recorded or run for the first time: its seconds say nothing
        self._seen: set[Plan] = set()
        self._recordings: dict[Plan, Recording] = {}  # the one that was played last comes last
        self._state: object = None  # of the tensors that the recordings hold
        self.captured = 0  # graphs so far
        self._logged: set[str] = set()  # reasons

    def rows(self, batch: int) -> int:
        """Return the rows of the bucket of B rows: a power of two, then a multiple of ``STEP``, at most all slots."""
        rounded = 1 << (batch - 1).bit_length() if batch <= STEP else -(-batch // STEP) * STEP
        return min(rounded, self.slots) if self.only_entries is None else self.slots

    def entries(self, longest: int) -> int:
        """Return the entries of the bucket of rows with at most ``longest``: a power of two."""
        return self.only_entries or 1 << (max(longest, SHORTEST) - 1).bit_length()

    def refuse(self, reason: str) -> bool:
        """Return whether there is a reason not to capture a cycle; log each reason once."""
        if reason and reason not in self._logged:
            self._logged.add(reason)
            log.warning("some cycles run without CUDA graphs: %s", reason)
        return bool(reason)

    def run(self, plan: Plan, state: object, body: Callable[[Plan], T], reason: str = "") -> T:
        """Run the body for a plan, in one launch if it has been recorded.

        ``state`` identifies the tensors that the body works on; recordings for other tensors are dropped. With a
        ``reason`` not to record it, the body runs as it is.
        """
        if self.refuse(reason):
            self.fresh = False
            return body(plan)
        if state != self._state:
            self.clear()
            self._state = state
        recording = self._recordings.pop(plan, None)
        self.fresh = recording is None
        if recording is None:
            if plan not in self._seen:
                self._seen.add(plan)
                return body(plan)
            recording = self._record(plan, body)
        self._recordings[plan] = recording
        found: T = recording()
        return found

    def clear(self) -> None:
        """Drop all recordings."""
        self._seen.clear()
        if self._recordings:
            self._recordings.clear()
            self.recorder.clear()

    def _record(self, plan: Plan, body: Callable[[Plan], object]) -> Recording:
        if len(self._recordings) == MOST:
            del self._recordings[next(iter(self._recordings))]
        before = self.recorder.held()
        recording, after = self.recorder.record(lambda: body(plan)), self.recorder.held()
        self.captured += 1
        shown = self.captured & (self.captured - 1) == 0  # the first, second, fourth, eighth: a job has dozens
        log.log(
            logging.WARNING if shown else logging.INFO,
            "CUDA graph %d: a cycle of %d rows, %d drafts and up to %d entries takes %.1f MiB; %d graphs hold %.1f MiB",
            self.captured, plan.rows, plan.drafts, plan.longest, (after - before) / 2**20, len(self._recordings) + 1,
            after / 2**20,
        )  # fmt: skip
        return recording


class StagedDrafts:
    """Copies of a cycle's drafts and uniforms at fixed addresses, which a recorded verification reads.

    Each part of a draft has one tensor for all slots and the most drafts, made on first use; buckets are views of its
    beginning. Distributions take S * K * V numbers there, as they do in any cycle of so many rows.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.layout = 0  # counts the times that a tensor was replaced by another
        self._held: dict[str, Tensor] = {}  # name -> [S * K * ...] or [S * ...]

    def put(self, plan: Plan, draft: Draft, uniforms: Tensor) -> tuple[Plan, Draft, Tensor]:
        """Copy a chain of drafts of B rows and their uniforms [B, 2K + 2]; return the plan and views of both.

        The views have the size of the bucket, whose width is rounded up to a power of two. Numbers beyond a row's own
        drafts are left from earlier cycles, and ``lengths`` excludes them. The plan gets the width and the names of the
        parts that exist.
        """
        assert draft.parents is None, "drafts from elsewhere are chains"
        batch, drafts = draft.tokens.shape
        width = min(1 << (drafts - 1).bit_length(), self.slots.sizes.drafts) if drafts else 0
        parts: list[str] = []

        def put(name: str, own: Tensor) -> Tensor:
            parts.append(name)
            wide = own.dim() > 1 and name not in (*NARROW, ".uniforms")
            assert not wide or own.shape[1] == drafts, f"{name} has {own.shape[1]} places for {drafts} drafts"
            rest = own.shape[2:] if wide else own.shape[1:]
            view = self._view(name, own, [plan.rows, width, *rest] if wide else [plan.rows, *rest], wide)
            if wide:
                view[:batch, :drafts] = own
            else:
                view[:batch] = own
            return view

        lengths = draft.tokens.new_full((batch,), drafts) if draft.lengths is None else draft.lengths
        held: Draft = of_tensors(replace(draft, lengths=lengths, total=None), put)
        assert held.lengths is not None
        held.lengths[batch:] = 0  # dead rows
        numbers = put(".uniforms", uniforms)
        return replace(plan, drafts=width, drafted=tuple(parts)), held, numbers

    def _view(self, name: str, like: Tensor, shape: list[int], wide: bool) -> Tensor:
        """Return the first numbers of a part's tensor as a view of ``shape``."""
        kept = self._held.get(name)
        if kept is None or kept.dtype != like.dtype:
            self.layout += kept is not None
            rows, most = self.slots.sizes.slots, self.slots.sizes.drafts
            kept = like.new_zeros(math.prod([rows, most, *shape[2:]] if wide else [rows, *shape[1:]]))
            self._held[name] = kept
        return kept[: math.prod(shape)].view(shape)
