"""Recording a graph without leaving a stream captured where something fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from .driver import Driver, DriverError


def record_graph(driver: Driver, stream: int, body: Callable[[], None]) -> int:
    """The graph of the work that `body` puts into the stream, ready for `Driver.replay`.

    Where `body` raises, the capture is ended and what was recorded is thrown away.
    """
    driver.begin_capture(stream)
    try:
        body()
    except BaseException:
        with contextlib.suppress(DriverError):  # the driver may have ended it by itself
            driver.destroy_graph(driver.end_capture(stream))
        raise
    return driver.end_capture(stream)
