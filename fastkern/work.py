"""A handle of a queued call, with the methods of torch.distributed's Work that callers use."""

from __future__ import annotations

from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta

from .turns import Queued


class Work:
    """A call in the queue of a communicator."""

    def __init__(self, future: Queued[None]) -> None:
        self._future = future

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the rows are delivered; True. Raises the call's error, or TimeoutError.

        timeout: a timedelta or seconds; zero and None wait until the call's own deadlines.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        try:
            self._future.result(seconds or None)
        except FutureTimeout:
            if self._future.done():
                raise
            raise TimeoutError(f"the call has not ended within {seconds} s") from None
        return True

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        """The error of an ended call; None while it runs or when it ended well."""
        return self._future.exception() if self._future.done() else None
