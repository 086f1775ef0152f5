"""The demo's text: bytes of real source code or of the user's file, and contexts cut from it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from .errors import DemoError

CONTEXT_BYTES = 8  # a token is one position of the text, seen through the bytes before it
MAX_TEXT_BYTES = 3_000_000
MIN_TEXT_BYTES = 1_000
_HELD_OUT = 0.4  # share at the end of the text that is not trained on


def read_text(path: Path | None) -> torch.Tensor:
    """The text as uint8 [bytes], cut at MAX_TEXT_BYTES. Raises DemoError where there is none.

    path: a file of any kind; None takes the Python standard library's own sources, in path order.
    """
    if path is None:
        text, source = _standard_library(), "Python's standard library has no sources here"
    else:
        try:
            with path.open("rb") as file:
                text = file.read(MAX_TEXT_BYTES)
        except OSError as error:
            raise DemoError(f"cannot read the text: {error}") from error
        source = f"{path} is too short"
    if len(text) < MIN_TEXT_BYTES:
        raise DemoError(f"{source}: {len(text)} bytes of text, at least {MIN_TEXT_BYTES} needed")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _standard_library() -> bytes:
    folder = Path(sysconfig.get_path("stdlib"))
    left, parts = MAX_TEXT_BYTES, []
    # Top level and its packages, without what the user installed and without the test suite.
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if left <= 0:
            break
        if path.parent.name in ("site-packages", "dist-packages", "test"):
            continue
        parts.append(path.read_bytes()[:left])
        left -= len(parts[-1])
    return b"".join(parts)


def split(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(to train on, held out)."""
    cut = int(len(text) * (1 - _HELD_OUT))
    return text[:cut], text[cut:]


def slices(held_out: torch.Tensor, num_ranks: int, num_tokens: int) -> list[torch.Tensor]:
    """For each rank a passage of its own, `num_tokens` positions long where the text allows.

    Passages start at equal distances, so ranks see different files, and do not overlap. Each has
    CONTEXT_BYTES more bytes than positions; one without positions is empty.
    """
    distance = len(held_out) // num_ranks
    size = min(num_tokens + CONTEXT_BYTES, distance)
    if size <= CONTEXT_BYTES:
        size = 0
    return [held_out[rank * distance : rank * distance + size] for rank in range(num_ranks)]


def contexts(passage: torch.Tensor) -> torch.Tensor:
    """The CONTEXT_BYTES bytes before each position: uint8 [positions, CONTEXT_BYTES]."""
    if len(passage) <= CONTEXT_BYTES:
        return torch.empty((0, CONTEXT_BYTES), dtype=torch.uint8)
    return passage[:-1].unfold(0, CONTEXT_BYTES, 1)
