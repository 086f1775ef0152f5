"""Shared memory names, processes' identities, and the removal of what dead runs left behind.

A segment is unlinked as soon as all ranks have mapped it, so a name exists for moments only. A run
that dies in such a moment leaves a file; the next communicator on the host removes it.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

_DIRECTORY = Path("/dev/shm")
_PREFIX = "fastkern"
_NAME = re.compile(rf"^{_PREFIX}-(\d+)-(\d+)-(\d+)-[0-9a-f]{{32}}$")


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, told apart from a later one with the same pid.

    pid: process id. start: start time in clock ticks since boot. namespace: inode of its pid
    namespace.
    """

    pid: int
    start: int
    namespace: int

    def alive(self) -> bool:
        """Whether the process still runs; True when it cannot be told from here."""
        if self.namespace != _pid_namespace():
            return True
        return _start_time(self.pid) == self.start


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _start_time(pid: int) -> int | None:
    """Start time of a running process; None when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def own_identity() -> ProcessIdentity:
    """This process."""
    start = _start_time(os.getpid())
    assert start is not None
    return ProcessIdentity(os.getpid(), start, _pid_namespace())


def fresh_name() -> str:
    """An unguessable segment name that tells which process made it."""
    me = own_identity()
    return f"/{_PREFIX}-{me.namespace}-{me.pid}-{me.start}-{secrets.token_hex(16)}"


def remove_leftovers() -> list[str]:
    """Unlink this user's segments whose makers are gone; returns their names."""
    removed = []
    for path in _DIRECTORY.glob(f"{_PREFIX}-*"):
        match = _NAME.match(path.name)
        if not match:
            continue
        namespace, pid, start = (int(k) for k in match.groups())
        try:
            owned = path.lstat().st_uid == os.geteuid()
            if owned and not ProcessIdentity(pid, start, namespace).alive():
                path.unlink()
                removed.append(path.name)
        except FileNotFoundError:
            continue  # another rank removed it first
    return removed
