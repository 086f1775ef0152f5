"""What the control words of a virtual cluster say after a launch: done, or who gave up and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DeadlineError, FastkernError
from ..wait_records import abort_epoch, abort_origin, wait_record
from .records import CONTROL

RECORD_WRITTEN = 2  # RecordState in kernels/body/args.h


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
    origin = abort_origin(word)
    record = controls[origin]["record"]
    if int(record["state"]) != RECORD_WRITTEN:
        return DeadlineError(f"{op}: rank {origin} gave up, and left no record of what it awaited")
    wait = wait_record(op, abort_epoch(word), origin, record)
    return DeadlineError(str(wait), wait)
