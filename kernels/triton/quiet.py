"""Between servers: the end of a call, which waits until this rank's puts have left its staging."""

from __future__ import annotations

import triton
import triton.language as tl

from . import layout as at
from . import wires
from .access import get
from .network import progress, progress_of_all, told_to_leave
from .pick import abort_call
from .target import now_ns, pause
from .waits import Missing

_PUTS_WAIT = tl.constexpr(at.NUM_QUEUES.value)  # kPutsWait, in place of a queue


@triton.jit
def await_quiet(call):
    """1 once this rank's puts have been read: only then may the next call reuse its staging. 0 when
    the rank has been told to leave. The deadline counts from the last change anywhere."""
    zero = call.rank * 0
    since = now_ns()
    seen = zero
    rounds = zero
    stays = 1 - told_to_leave(call)
    done = zero
    if stays != 0:
        done = wires.quiet(call)
    while (stays != 0) & (done == 0):
        now = now_ns()
        if now - since > get(call.args, at.ARGS_PROGRESS_NS):
            found = progress_of_all(call)
            if found == seen:
                nothing = Missing(found=zero, expected=zero, seen=zero, peer=call.rank, slot=zero)
                abort_call(call, nothing, zero + _PUTS_WAIT, zero, zero, now - since)
            seen = found
            since = now
        progress(call)
        pause(rounds.to(tl.int32))
        rounds += 1
        stays = 1 - told_to_leave(call)
        if stays != 0:
            done = wires.quiet(call)
    return stays
