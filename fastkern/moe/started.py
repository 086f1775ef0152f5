"""Dispatch and combine in two steps: start, and finish.

An operation takes its turn through `take_turn`, deep inside what autograd sees. It is started by
calling it up to there: the turn is queued, and the call left by an exception. `finish` calls it
again, now with the queued turn's result in the place of a turn of its own: so the tensors come out
of the same operators, with the same gradients, as those of a plain call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from ..turns import Queued, Turns

T = TypeVar("T")
_Taker = Callable[[Turns, Callable[[], Any]], Any]

_taker: ContextVar[_Taker | None] = ContextVar("fastkern_turn_taker", default=None)


class _Left(BaseException):
    """Thrown from an operation whose turn has been queued."""

    def __init__(self, turns: Turns, future: Queued[Any]) -> None:
        super().__init__()
        self.turns, self.future = turns, future


def take_turn(turns: Turns, run: Callable[[], T]) -> T:
    """Run in turn; or as `start` and `finish` want it."""
    taker = _taker.get()
    if taker is None:
        return turns.call(run)
    result: T = taker(turns, run)
    return result


def _taken_by(taker: _Taker, call: Callable[[], T]) -> T:
    token = _taker.set(taker)
    try:
        return call()
    finally:
        _taker.reset(token)


class Pending(Generic[T]):
    """What `dispatch_start` and `combine_start` return.

    Until `finish`, the communicator refuses other calls, and the tensors given must not be written.
    """

    def __init__(self, turns: Turns, future: Queued[Any], call: Callable[[], T]) -> None:
        self._turns = turns
        self._future = future
        self._call: Callable[[], T] | None = call

    def done(self) -> bool:
        """Whether the rows have been delivered, or the call has failed."""
        return self._future.done()

    def finish(self) -> T:
        """Wait, and return what the plain call returns, or raise its error. Once."""
        call, self._call = self._call, None
        if call is None:
            raise ValueError("finish: this call has been finished already")
        self._future.exception()  # waits
        self._turns.finish()
        return _taken_by(lambda turns, run: self._future.result(), call)


def start(
    op: str, operation: Callable[..., T], args: Sequence[Any], options: Mapping[str, Any]
) -> Pending[T]:
    """Start `operation`; op: its name, for those who are refused meanwhile."""

    def leave(turns: Turns, run: Callable[[], Any]) -> Any:
        raise _Left(turns, turns.start(op, run))

    def call() -> T:
        return operation(*args, **options)

    try:
        _taken_by(leave, call)
    except _Left as left:
        return Pending(left.turns, left.future, call)
    raise RuntimeError(f"{op} took no turn")
