"""What the control words of a virtual cluster say after a launch: done, or who gave up and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DeadlineError, FastkernError, WaitRecord
from ..planner.table import QUEUES, VALUE_BITS
from .records import CONTROL

_WRITTEN = 2  # RecordState in kernels/body/args.h


def control_record(raw: npt.NDArray[np.uint8]) -> Any:
    """One rank's Control, from its bytes."""
    return raw[: CONTROL.itemsize].view(CONTROL)[0]


def launch_error(controls: list[Any], op: str, expected_epoch: int) -> FastkernError | None:
    """What went wrong in the launch that ended with these words, or None.

    controls: one per rank. expected_epoch: what every rank has completed after a good launch.
    """
    words = [int(control["abort"]) for control in controls]
    if any(words):
        return _aborted(controls, words, op)
    for rank, control in enumerate(controls):
        completed = int(control["epoch"])
        if completed != expected_epoch:
            return FastkernError(
                f"{op}: rank {rank} has completed call {completed}, not {expected_epoch}: its "
                "blocks did not run, or left without a word"
            )
    return None


def _aborted(controls: list[Any], words: list[int], op: str) -> FastkernError:
    word = next(w for w in words if w)
    origin = (word & ((1 << VALUE_BITS) - 1)) - 1
    record = controls[origin]["record"]
    if int(record["state"]) != _WRITTEN:
        return DeadlineError(f"{op}: rank {origin} gave up, and left no record of what it awaited")
    queue = int(record["queue"])
    wait = WaitRecord(
        op=op,
        call=word >> VALUE_BITS,
        rank=origin,
        peer=int(record["peer"]),
        item=(*QUEUES, "end of its puts")[queue],
        stage=int(record["stage"]),
        chunk=int(record["chunk"]),
        expected=_call_and_value(int(record["expected"])),
        seen=_call_and_value(int(record["seen"])),
        waited_s=int(record["waited_ns"]) * 1e-9,
    )
    return DeadlineError(str(wait), wait)


def _call_and_value(flag: int) -> tuple[int, int]:
    return flag >> VALUE_BITS, flag & ((1 << VALUE_BITS) - 1)
