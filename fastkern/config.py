"""Settings from the environment: the only module that reads it. The prefix is FASTKERN_."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .planner.api import POLICY_NAMES
from .transports import Transport, resolve

BACKENDS = ("host", "cuda", "hip", "triton")
# Where libraries are installed, as their own makers have it said.
_PREFIXES = {
    "cuda": ("CUDA_HOME", "CUDA_PATH"),
    "nccl": ("NCCL_HOME",),
    "nvshmem": ("NVSHMEM_HOME",),
    "rocm": ("ROCM_PATH",),
    "rocshmem": ("ROCSHMEM_HOME",),
}
_MOST = 1 << 62
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Settings:
    """Defaults of a communicator; an argument given in code wins over each.

    FASTKERN_TRANSPORT: "shm" (default) or "shaped" for CPU tensors, "peer" for GPUs of one host.
    FASTKERN_BACKEND: "host", "cuda", "hip" or "triton"; by default what the transport needs.
    FASTKERN_POLICY: planner policy, "auto" by default.
    FASTKERN_NUM_BLOCKS: blocks per launch; by default as the tuning profile has it, see
        FASTKERN_PROFILE.
    FASTKERN_CHUNK_BYTES: size a put is cut into, bytes; by default as the profile has it, 131072
        where it says nothing.
    FASTKERN_BUFFER_BYTES: staging and window reserved per rank at creation, bytes; grows when
    needed.
    FASTKERN_MAX_BUFFER_BYTES: the most staging and window per rank, 4 GiB; a call that needs more
        is done in rounds.
    FASTKERN_ENTRY_TIMEOUT_S: how long to wait for ranks that have not entered a call; by default
        the process group's timeout.
    FASTKERN_PROGRESS_TIMEOUT_S: how long a call that all ranks have entered may stand still, 30.
    FASTKERN_DEBUG: 1 validates every plan before it runs.
    LOCAL_WORLD_SIZE: ranks per server, as launchers set it.
    """

    transport: str | Transport = "auto"
    policy: str = "auto"
    num_blocks: int | None = None
    chunk_bytes: int = 128 * 1024
    buffer_bytes: int = 1 << 20
    max_buffer_bytes: int = 4 << 30
    entry_timeout_s: float | None = None
    progress_timeout_s: float = 30.0
    debug: bool = False
    local_world_size: int | None = None
    backend: Any = None  # a name, or a Driver

    def __post_init__(self) -> None:
        """Raises ValueError or TypeError naming the setting."""
        if self.transport == "auto":
            name = "shm" if self.backend in (None, "host") else "peer"
            object.__setattr__(self, "transport", name)
        for name, least, most in (
            ("num_blocks", 1, 1024),
            ("chunk_bytes", 1, _MOST),
            ("buffer_bytes", 0, _MOST),
            ("max_buffer_bytes", 1, _MOST),
        ):
            value = getattr(self, name)
            if name == "num_blocks" and value is None:
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"{name} must be a whole number, not {value!r}")
            if not least <= value <= most:
                raise ValueError(f"{name} must be {least} to {most}, not {value!r}")
        for name in ("entry_timeout_s", "progress_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, not {value!r}")
        resolve(self.transport)
        if isinstance(self.backend, str) and self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}")
        if self.policy not in POLICY_NAMES:
            raise ValueError(
                f"policy must be one of {', '.join(POLICY_NAMES)}, not {self.policy!r}"
            )


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


def _environment() -> dict[str, Any]:
    given = {
        "transport": os.environ.get("FASTKERN_TRANSPORT") or None,
        "backend": os.environ.get("FASTKERN_BACKEND") or None,
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
    return {"debug": debug, **{k: v for k, v in given.items() if v is not None}}


def read_settings() -> Settings:
    """The settings of this process. Raises ValueError naming the variable."""
    return Settings(**_environment())


def choose_settings(given: dict[str, Any], defaults: Mapping[str, Any] = _NOTHING) -> Settings:
    """The environment's settings with those given in code (not None) over them.

    defaults: for what neither of them says.
    """
    by_code = {k: v for k, v in given.items() if v is not None}
    return Settings(**{**defaults, **_environment(), **by_code})


def read_cache_dir() -> Path | None:
    """Where this user's compiled kernels may be kept; None where no home folder is known.

    FASTKERN_CACHE_DIR if set. Otherwise what platformdirs says, which on Linux is the same as the
    rule used where it is not installed: "fastkern" in XDG_CACHE_HOME if that is an absolute path,
    else in ~/.cache. Nothing is made here. Raises ValueError for a ~ that nothing is known of.
    """
    return _named_path("FASTKERN_CACHE_DIR") or _user_folder("cache", "XDG_CACHE_HOME", "~/.cache")


def read_profile_path() -> tuple[Path | None, bool]:
    """The user's tuning profile, see fastkern.tuning; and whether FASTKERN_PROFILE names it.

    FASTKERN_PROFILE: a file, which must be there; or "built-in" for no file, whatever there is. By
    default tuning.json in the user's configuration folder for fastkern, found as read_cache_dir
    finds its own (on Linux XDG_CONFIG_HOME, ~/.config); None where no home folder is known.
    """
    if os.environ.get("FASTKERN_PROFILE", "").strip() == "built-in":
        return None, False
    named = _named_path("FASTKERN_PROFILE")
    if named is not None:
        return named, True
    folder = _user_folder("config", "XDG_CONFIG_HOME", "~/.config")
    return None if folder is None else folder / "tuning.json", False


def _named_path(variable: str) -> Path | None:
    """The path that a variable holds. Raises ValueError for a ~ that nothing is known of."""
    given = os.environ.get(variable, "").strip()
    try:
        return Path(given).expanduser().absolute() if given else None
    except RuntimeError:
        raise ValueError(f"{variable}={given!r}: no such home folder") from None


def _user_folder(kind: str, variable: str, usual: str) -> Path | None:
    """fastkern's folder of a kind; None where no home folder is known."""
    try:
        import platformdirs
    except ImportError:
        base = Path(os.environ.get(variable, "").strip())
        found = (base if base.is_absolute() else Path(usual)) / "fastkern"
    else:
        found = Path(getattr(platformdirs, f"user_{kind}_path")("fastkern"))
    try:
        found = found.expanduser()
    except RuntimeError:  # a user without a home
        return None
    return found if found.is_absolute() else None


def read_prefix(library: str) -> Path | None:
    """Where the environment says that a library is installed; None where it does not.

    library: "cuda" (CUDA_HOME, CUDA_PATH), "nccl" (NCCL_HOME), "nvshmem" (NVSHMEM_HOME), "rocm"
    (ROCM_PATH) or "rocshmem" (ROCSHMEM_HOME). The first variable that is not empty.
    """
    for name in _PREFIXES[library]:
        if given := os.environ.get(name, "").strip():
            return Path(given).absolute()
    return None


def read_compiler_environment() -> dict[str, str]:
    """What nvcc is started with: this process's environment without what adds options to it."""
    added = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
    return {name: value for name, value in os.environ.items() if name not in added}
