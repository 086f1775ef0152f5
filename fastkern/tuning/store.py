"""Where profiles lie, and which one a device goes by."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from ..config import read_profile_path
from .profile import Profile, format_profiles, parse_profiles

log = logging.getLogger("fastkern")

_MOST_FILE_BYTES = 16 << 20
BUILT_IN = "the built-in profile"


def read_profiles(path: Path) -> list[Profile]:
    """The profiles of a file. Raises ValueError naming the file, and the field that is wrong."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"tuning profile {path}: {error.strerror or error}") from None
    if len(content) > _MOST_FILE_BYTES:
        raise ValueError(f"tuning profile {path}: more than {_MOST_FILE_BYTES} bytes")
    try:
        return parse_profiles(content.decode())
    except ValueError as error:  # of JSON and UTF-8 too
        raise ValueError(f"tuning profile {path}: {error}") from None


def built_in_profiles() -> list[Profile]:
    """Those that came with fastkern."""
    text = files(__package__).joinpath("built_in.json").read_text(encoding="utf-8")
    return parse_profiles(text)


def user_file() -> Path | None:
    """The user's file: FASTKERN_PROFILE, which must be there, or the one in the user's
    configuration folder, if it is there. None: only what is built in counts."""
    path, named = read_profile_path()
    return path if path is not None and (named or path.exists()) else None


def find_profile(
    architecture: str, device_name: str, transport: str, kernels: str = "cxx"
) -> tuple[Profile, str]:
    """The profile for a device and the kernels that it runs, and where it is from.

    Of the user's file, where one there is for it, else a built-in one. The most specific one wins:
    architecture before name of the device before transport. Raises ValueError for a file that
    cannot be read.
    """
    wanted = (architecture, device_name, transport)
    path = user_file()
    if path is not None:
        found = _most_specific(read_profiles(path), wanted, kernels)
        if found is not None:
            return found, str(path)
        log.info("%s has nothing for %s, %s over %s", path, *wanted)
    found = _most_specific(built_in_profiles(), wanted, kernels)
    assert found is not None, "a built-in profile is for any device"
    return found, BUILT_IN


def save_profile(path: Path, profile: Profile) -> None:
    """Write a profile into a file, in the place of one for the same device and kernels; others
    stay.

    The file is whole at all times. Raises ValueError for one that cannot be read or written.
    """
    others = read_profiles(path) if path.exists() else []
    kept = [other for other in others if not profile.replaces(other)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        written = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(format_profiles([*kept, profile]))
            written.replace(path)
        except BaseException:
            written.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ValueError(f"tuning profile {path}: {error.strerror or error}") from None


def _most_specific(
    profiles: Sequence[Profile], wanted: tuple[str, str, str], kernels: str
) -> Profile | None:
    def fits(profile: Profile) -> bool:
        return profile.kernels == kernels and all(
            has in (None, want) for has, want in zip(profile.key, wanted, strict=True)
        )

    fitting = [profile for profile in profiles if fits(profile)]
    return max(fitting, key=lambda p: [part is not None for part in p.key], default=None)
