"""What a kernel that gave up has left behind, as a WaitRecord."""

from __future__ import annotations

from typing import Any

from .errors import WaitRecord
from .planner.table import QUEUES, VALUE_BITS


def abort_origin(word: int) -> int:
    """The rank that wrote an abort word."""
    return (word & ((1 << VALUE_BITS) - 1)) - 1


def abort_epoch(word: int) -> int:
    """The launch in which an abort word was written."""
    return word >> VALUE_BITS


def abort_word(epoch: int, origin: int) -> int:
    """The abort word that a rank writes in a launch."""
    return epoch << VALUE_BITS | origin + 1


def wait_record(op: str, call: int, rank: int, fields: Any) -> WaitRecord:
    """From an ErrorRecord's fields by name (kernels/body/args.h), which `rank` has written."""
    return WaitRecord(
        op=op,
        call=call,
        rank=rank,
        peer=int(fields["peer"]),
        item=(*QUEUES, "end of its puts", "entry")[int(fields["queue"])],
        stage=int(fields["stage"]),
        chunk=int(fields["chunk"]),
        expected=_call_and_value(int(fields["expected"])),
        seen=_call_and_value(int(fields["seen"])),
        waited_s=int(fields["waited_ns"]) * 1e-9,
    )


def _call_and_value(flag: int) -> tuple[int, int]:
    return flag >> VALUE_BITS, flag & ((1 << VALUE_BITS) - 1)
