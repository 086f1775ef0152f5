"""Dispatches and combines of one shape that the host only enqueues: for graphs, and low latency."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import ClosedError, FastkernError, WaitRecord
from ..moe.combine_arguments import CombineCall, prepare_combine
from ..moe.dispatch_arguments import DispatchCall, prepare_dispatch
from ..moe.static_shape import Reverse, StaticShape
from ..planner import Topology
from ..turns import Turns
from .memory import SymmetricHeap
from .static_calls import DispatchMark, StaticCalls
from .static_gradients import differentiable_combine, differentiable_dispatch
from .static_received import ReceivedRows
from .static_site import StaticSite
from .together import logged

if TYPE_CHECKING:
    from .device_runtime import DeviceRuntime

T = TypeVar("T")


@dataclass(frozen=True)
class StaticDispatched:
    """What a static dispatch gives; see StaticExchange.dispatch.

    tokens_per_expert: int64 [own experts] on the device. mark: for combine.
    """

    recv_x: Any
    recv_topk_weights: torch.Tensor | None
    recv_topk_idx: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    mark: DispatchMark


class StaticExchange:
    """Dispatches and combines with memory and epochs of their own; made by all ranks together.

    Made by Communicator.static_exchange. Each call is enqueued into the current stream and returns
    at once: no count comes to the host. So both may be captured into a CUDA or HIP graph, with any
    replays, and with eager calls of the communicator in between. All ranks make the same calls and
    replays, in the same order. A captured call keeps its number of tokens: pad with rows of
    topk_idx that are -1.

    Handle, tables and counts are those of the last dispatch that was made or replayed. A combine
    belongs to it, and so does a backward, which comes before the next dispatch. What is in flight
    beside it needs an exchange of its own: `sibling` makes one that shares the heap. Eager calls
    follow one another whatever streams they are in; replays, and calls of siblings, are ordered by
    the caller, by one stream or by events.

    Where errors appear: what the host can see of a call's arguments, at once, on this rank. Ranks
    do not compare them, so the others are told that it has left, which breaks the communicator (not
    while a graph is captured, when nothing runs). A bad index, and more rows than there is room for
    (duplicates of an expert in a token's choices): the call moves nothing on any rank, so that
    combined rows are zeros and rows received unwritten. A combine or backward of another dispatch
    than the last: its results are wrong. Of both a line is logged, and check() raises ValueError,
    once. (Calls do not: ranks learn of it at different times, and one that left out a call would
    leave the others waiting.) Deadlines break the communicator: dispatch has the entry deadline
    until all ranks have come, then the progress deadline; combine and backward, to which a rank may
    come late, the longer of the two.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        turns: Turns,
        shape: StaticShape,
        topology: Topology,
        chunk_bytes: int,
        num_blocks: int,
        beside: StaticExchange | None = None,
    ) -> None:
        self.shape = shape
        self._runtime = runtime
        self._turns = turns
        self._topology = topology
        self._rank = runtime.rank
        self._info = shape.info(runtime.rank, topology, 0)
        self._chunk_bytes = chunk_bytes
        self._num_blocks = num_blocks
        self.last: DispatchMark | None = None
        self._site: StaticSite = StaticSite(
            runtime,
            shape,
            topology,
            chunk_bytes,
            num_blocks,
            None if beside is None else beside._site,
        )
        self._calls = StaticCalls(runtime, self._site, shape, self._info)
        self._closed = False

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._site.name

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @property
    def device(self) -> torch.device:
        """Where the tensors of calls are."""
        return self._runtime.device

    @property
    def received(self) -> ReceivedRows:
        """What the last dispatch has received, for gradients."""
        return self._calls.received

    @property
    def num_recv_rows(self) -> int:
        """Rows of this rank's outputs: the worst case."""
        return self._info.num_recv_rows

    # -- calls -------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
    ) -> StaticDispatched:
        """Send each token to the ranks of its experts, as Communicator.dispatch does.

        x: [T, ...], or as many tensors as the exchange was made for; T up to
        num_max_tokens_per_rank, any on each rank. topk_idx: [T, K]; -1 for no choice. topk_weights:
        [T, K].

        Returns tensors of the worst case of rows. Layout "expert": as Communicator.dispatch, expert
        after expert, tokens_per_expert rows each, padded to the alignment. Layout "rank": the rows
        of source rank s from row s * num_max_tokens_per_rank on (planner "host": one source after
        the other). Rows in which nothing was received have weight 0, index -1, and zeros where
        zero_padding asks for them. They may be used in stream order. Expert e's rows of layout
        "expert" begin at the sum of those before it, each rounded up to the alignment.

        Raises TypeError or ValueError for bad arguments, on this rank; and what broke the
        communicator, as far as it is known.
        """
        one = isinstance(x, torch.Tensor)
        with self._telling_others():
            xs: list[Any] = [x] if one else list(x)
            call = prepare_dispatch(
                xs,
                topk_idx,
                topk_weights,
                self.shape.options,
                None,
                None,
                None,
                self._topology.num_ranks,
                self._runtime.device,
            )
            self.shape.check_dispatch(call)
            differentiated = self._differentiated([*xs, topk_weights])
        if differentiated:
            made = differentiable_dispatch(self, call, xs, topk_weights)
        else:
            made = self.run_dispatch(call)
        mark = self.last
        assert mark is not None
        *rest, tokens = made
        recv, rest = rest[: len(xs)], rest[len(xs) :]
        weights = None if topk_weights is None else rest.pop(0)
        idx = rest.pop() if rest else None
        return StaticDispatched(recv[0] if one else recv, weights, idx, tokens, mark)

    def run_dispatch(self, call: DispatchCall) -> list[torch.Tensor]:
        """A dispatch that has been checked: payloads, weights and indices if any, token counts."""
        made, self.last = self._run(lambda: self._calls.dispatch(call))
        return made

    def combine(
        self,
        expert_out: torch.Tensor,
        weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        of: StaticDispatched | None = None,
    ) -> torch.Tensor:
        """Bring expert outputs back to the tokens of the last dispatch, summed: [T, ...].

        expert_out: [num_recv_rows, ...], with the rows of recv_x. weights, bias, out: as of
        Communicator.combine, which gives the same sums, bit by bit. of: what the dispatch gave,
        where it is not the last one made here, but will be the last one on the device: in graphs
        that are captured one after the other.
        """
        with self._telling_others():
            mark = self._mark_of(of)
            self.shape.check_combine(expert_out)
            call = prepare_combine(
                expert_out,
                self.shape.info(self._rank, self._topology, mark.num_tokens),
                torch.empty(0, dtype=torch.int64),
                weights,
                bias,
                self.shape.wire_dtype,
                out,
                self._runtime.device,
            )
            differentiated = self._differentiated([expert_out, weights, bias, mark.anchor])
            if differentiated and out is not None:
                raise ValueError("combine: out cannot be given where gradients are wanted")
        if differentiated:
            return differentiable_combine(self, call, mark, expert_out, weights, bias)
        return self.run_combine(call, mark)

    def run_combine(
        self, call: CombineCall, mark: DispatchMark, reverse: Reverse | None = None
    ) -> torch.Tensor:
        """A combine that has been checked: of expert outputs, or of a backward's gradients."""
        return self._run(lambda: self._calls.combine(call, mark, reverse))

    def run_again(self, x: torch.Tensor, mark: DispatchMark, reverse: Reverse) -> torch.Tensor:
        """Rows of the last dispatch's tokens to where they went; zeros where nothing is received.

        x: [T, ...] contiguous. In the rank layout each token's row once.
        """
        return self._run(lambda: self._calls.again(x, mark, reverse))

    def _differentiated(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        if not torch.is_grad_enabled() or not any(
            t is not None and t.requires_grad for t in tensors
        ):
            return False
        if not self.shape.gradients:
            raise RuntimeError(
                "this static exchange was made without gradients=True: call it under "
                "torch.no_grad()"
            )
        return True

    def _mark_of(self, of: StaticDispatched | None) -> DispatchMark:
        """Which dispatch a combine belongs to."""
        if of is not None and not isinstance(of, StaticDispatched):
            raise TypeError(f"of must be what dispatch gave, not {type(of).__name__}")
        mark = self.last if of is None else of.mark
        if mark is None:
            raise ValueError("combine: there was no dispatch before")
        if mark.exchange != self.name:
            raise ValueError(f"of: given by {mark.exchange}, this is {self.name}")
        return mark

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """Checks of a call's arguments: ranks do not compare them, and would wait for this one."""
        try:
            yield
        except Exception as error:
            if not self._closed and not self._runtime.streams.capturing():
                self._runtime.fail(error)
            raise

    def _run(self, call: Callable[[], T]) -> T:
        """In turn. What fails on this rank alone is told to the others, who would wait for it."""

        capturing = self._runtime.streams.capturing()
        if capturing and self._turns.queued:
            raise FastkernError(
                f"{self.name}: calls of the communicator are queued, whose thread would disturb "
                "the capture: wait for them first"
            )

        def run() -> T:
            if self._closed:
                raise ClosedError("the static exchange is closed")
            if capturing:
                return call()
            self._runtime.check()
            return self._runtime.guarded(call)

        return self._turns.call(run)

    # -- failures ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what went wrong in calls and replays, as far as they have ended; never waits.

        ValueError for a wrong call, once; what broke the communicator, each time. ClosedError after
        `close`.
        """
        if self._closed:
            raise ClosedError(f"{self.name} is closed")
        self._runtime.check()
        self._site.check()

    def sibling(self) -> StaticExchange:
        """One more exchange of this shape, for a dispatch in flight beside this one's. Collective.

        It has a handle, tables and counts of its own, and uses this one's heap, which is given back
        when all of them are closed; so their calls must not overlap.
        """
        return self._turns.call(
            lambda: self._runtime.statics.make_beside(
                self, self._topology, self._turns, self._chunk_bytes, self._num_blocks
            )
        )

    @property
    def heap(self) -> SymmetricHeap:
        """Where the kernels of other ranks find this one's abort word."""
        return self._site.heap

    def look(self) -> FastkernError | None:
        """What made a kernel give up, as far as the host's memory says."""
        return None if self._closed else self._site.look()

    def record(self) -> WaitRecord | None:
        """What the kernel that gave up has left, as the device's memory says."""
        return None if self._closed else self._site.record()

    # -- end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give its memory back, once its calls have ended. Not collective; may be repeated.

        No graph that captured its calls may be replayed, here or on another rank, from now on.
        """
        if not self._closed:
            self._closed = True
            self._runtime.statics.forget(self)
            logged("closing a static exchange", self._site.close)

    def __enter__(self) -> StaticExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
