"""Triton itself: whether it is here, which release, and whether it interprets."""

from __future__ import annotations

import importlib
import re
from typing import Any

from ..errors import DeviceUnavailableError

OLDEST = (3, 6)
_INSTALL = "`pip install 'fastkern[triton]'`"


def import_triton() -> Any:
    """The module. Raises DeviceUnavailableError where there is none, or one that is too old."""
    try:
        triton = importlib.import_module("triton")
    except ImportError as error:
        raise DeviceUnavailableError(
            f"cannot import triton ({error}), which backend triton needs: {_INSTALL}"
        ) from error
    _check_release(triton, OLDEST, "backend triton")
    return triton


def check_release(oldest: tuple[int, int], what: str) -> None:
    """Raise DeviceUnavailableError unless Triton is of this release or a later one, which `what`
    needs beside backend triton."""
    _check_release(import_triton(), oldest, f"{what} of backend triton")


def _check_release(triton: Any, oldest: tuple[int, int], what: str) -> None:
    found = re.match(r"(\d+)\.(\d+)", str(triton.__version__))
    if found is None or tuple(map(int, found.groups())) < oldest:
        raise DeviceUnavailableError(
            f"Triton {triton.__version__} is too old: {what} needs "
            f"{oldest[0]}.{oldest[1]} or later: {_INSTALL}"
        )


def interpreting() -> bool:
    """Whether Triton runs kernels by its interpreter, as TRITON_INTERPRET=1 tells it to.

    Raises as `import_triton`.
    """
    return bool(import_triton().knobs.runtime.interpret)
