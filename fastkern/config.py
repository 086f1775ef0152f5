"""Settings from the environment: the only module that reads it. The prefix is FASTKERN_."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Defaults of a communicator; an argument given in code wins over each.

    FASTKERN_TRANSPORT: "shm" (default) or "shaped".
    FASTKERN_POLICY: planner policy, "auto" by default.
    FASTKERN_NUM_BLOCKS: blocks per launch, 1 by default (host ranks usually outnumber cores).
    FASTKERN_CHUNK_BYTES: size a put is cut into, bytes.
    FASTKERN_BUFFER_BYTES: staging and window reserved per rank at creation, bytes; grows when
    needed.
    FASTKERN_MAX_BUFFER_BYTES: the most staging and window per rank, 4 GiB; a call that needs more
        is done in rounds.
    FASTKERN_ENTRY_TIMEOUT_S: how long to wait for ranks that have not entered a call; by default
    the
        process group's timeout.
    FASTKERN_PROGRESS_TIMEOUT_S: how long a call that all ranks have entered may stand still, 30.
    FASTKERN_DEBUG: 1 validates every plan before it runs.
    LOCAL_WORLD_SIZE: ranks per server, as launchers set it.
    """

    transport: str = "shm"
    policy: str = "auto"
    num_blocks: int = 1
    chunk_bytes: int = 128 * 1024
    buffer_bytes: int = 1 << 20
    max_buffer_bytes: int = 4 << 30
    entry_timeout_s: float | None = None
    progress_timeout_s: float = 30.0
    debug: bool = False
    local_world_size: int | None = None


def _number(name: str, kind: type[int] | type[float], least: float) -> int | float | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number") from None
    if not value >= least:
        raise ValueError(f"{name}={text!r} must be at least {least}")
    return value


def read_settings() -> Settings:
    """The settings of this process. Raises ValueError naming the variable."""
    given = {
        "transport": os.environ.get("FASTKERN_TRANSPORT") or None,
        "policy": os.environ.get("FASTKERN_POLICY") or None,
        "num_blocks": _number("FASTKERN_NUM_BLOCKS", int, 1),
        "chunk_bytes": _number("FASTKERN_CHUNK_BYTES", int, 1),
        "buffer_bytes": _number("FASTKERN_BUFFER_BYTES", int, 0),
        "max_buffer_bytes": _number("FASTKERN_MAX_BUFFER_BYTES", int, 1),
        "entry_timeout_s": _number("FASTKERN_ENTRY_TIMEOUT_S", float, 0.001),
        "progress_timeout_s": _number("FASTKERN_PROGRESS_TIMEOUT_S", float, 0.001),
        "local_world_size": _number("LOCAL_WORLD_SIZE", int, 1),
    }
    debug = os.environ.get("FASTKERN_DEBUG", "0") not in ("", "0")
    return Settings(debug=debug, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
