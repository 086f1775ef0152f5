"""Compiled kernels, kept in memory and in a folder of the user's own.

The folder holds KEY.kernel, an entry each; tmp-*, one being written; lock-*, see below. A key is
the digest of all that the code depends on, so an entry is never out of date, only unused: those
that nobody has asked for in 90 days go when another is written.

Trust: entries run on the GPU. The folder must belong to this user and be writable by nobody else,
which is checked at each use, through the open folder that all further steps go through. Any other
is left alone, with a warning, as is one that cannot be made.

Several processes: one compiles, under a lock, and the others wait for its entry; all ranks of a
machine start at once, and compiling the same on each would slow them all. The lock only saves work:
who cannot have it, or has waited too long for it (the holder may be stopped), compiles as well, and
the last one to rename its file into place wins. A reader sees a whole file or none.

Damage: an entry starts with the digest of its key and code. What does not fit is compiled again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

log = logging.getLogger("fastkern")

_MAGIC = b"fastkern kernel, format 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_UNUSED_S = 90 * 24 * 3600.0
_TOUCH_S = 24 * 3600.0  # how often a use is noted
_LEFTOVER_S = 3600.0  # a file still being written after this long has lost its writer
_POLL_S = 0.02


def key_of(**parts: Iterable[str]) -> str:
    """A name for an entry: the digest of named lists of texts, the same only for the same lists."""
    digest = hashlib.sha256(_MAGIC)
    for name, texts in sorted(parts.items()):
        whole = [name.encode(), *(text.encode() for text in texts)]
        digest.update(f"{len(whole)};".encode())
        for text in whole:
            digest.update(f"{len(text)}:".encode() + text)
    return digest.hexdigest()


class KernelCache:
    """Entries by key. Threads of a process take turns, also to compile.

    folder: made when needed, for its owner only; None: this process's memory alone.
    lock_timeout_s: how long to wait for another process that may be compiling the same.
    """

    def __init__(self, folder: Path | None, lock_timeout_s: float = 120.0) -> None:
        self._folder = folder
        self._lock_timeout_s = lock_timeout_s
        self._entries: dict[str, bytes] = {}
        self._turn = threading.Lock()
        self._warned: set[str] = set()
        if folder is None:
            self._warn("folder", "no cache folder is known (FASTKERN_CACHE_DIR sets one)")

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The entry, or what `make` returns, which is kept. What `make` raises is passed on."""
        with self._turn:
            if key not in self._entries:
                with self._open_folder() as folder:
                    self._entries[key] = make() if folder is None else self._get(folder, key, make)
            return self._entries[key]

    def _get(self, folder: int, key: str, make: Callable[[], bytes]) -> bytes:
        code = self._read(folder, key)
        if code is None:
            with self._locked(folder, key):
                code = self._read(folder, key)  # made while this process waited?
                if code is None:
                    code = make()
                    self._write(folder, key, code)
        return code

    @contextlib.contextmanager
    def _open_folder(self) -> Iterator[int | None]:
        """The folder's descriptor; None where it cannot be used."""
        folder = None
        if self._folder is not None:
            try:
                folder = _open_own_folder(self._folder)
            except OSError as error:
                self._warn("folder", f"kernels are not kept on disk: {error}")
        try:
            yield folder
        finally:
            if folder is not None:
                os.close(folder)

    def _read(self, folder: int, key: str) -> bytes | None:
        try:
            content, age_s = _read_whole(folder, _name(key))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(key, f"a kernel in {self._folder} cannot be read: {error}")
            return None
        start = len(_MAGIC) + _DIGEST_BYTES
        code = content[start:]
        if content[:start] != _header(key, code):
            self._warn(key, f"{_name(key)} in {self._folder} is damaged; compiling it again")
            return None
        if age_s > _TOUCH_S:
            with contextlib.suppress(OSError):  # a folder that can only be read
                os.utime(_name(key), dir_fd=folder, follow_symlinks=False)
        return code

    def _write(self, folder: int, key: str, code: bytes) -> None:
        try:
            _write_whole(folder, _name(key), _header(key, code) + code)
            _remove_unused(folder)
        except OSError as error:
            self._warn("write", f"a kernel cannot be kept in {self._folder}: {error}")

    @contextlib.contextmanager
    def _locked(self, folder: int, key: str) -> Iterator[None]:
        """Hold one of 16 locks, which are never removed: who removes one may part two holders."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.ExitStack() as held:
            try:
                file = os.open(f"lock-{key[0]}", flags, 0o600, dir_fd=folder)
                held.callback(os.close, file)
                if _lock_by(file, time.monotonic() + self._lock_timeout_s):
                    # Not left to close(): a child forked meanwhile would go on holding it.
                    held.callback(fcntl.flock, file, fcntl.LOCK_UN)
                else:
                    self._warn("lock", f"another process holds a lock in {self._folder} for long")
            except OSError as error:  # a folder that can only be read, or without locks
                log.debug("no lock in %s: %s", self._folder, error)
            yield

    def _warn(self, about: str, text: str) -> None:
        """Once for each subject."""
        if about not in self._warned:
            self._warned.add(about)
            log.warning("%s", text)


def _open_own_folder(path: Path) -> int:
    """Make the folder if need be, open it, check whose it is. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(folder)
    if status.st_uid != os.geteuid():
        os.close(folder)
        raise PermissionError(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(folder)
        raise PermissionError(f"others may write to {path}; `chmod 700` it")
    return folder


def _name(key: str) -> str:
    return f"{key}.kernel"


def _header(key: str, code: bytes) -> bytes:
    """With the key, so that a file under another's name is not taken for it."""
    return _MAGIC + hashlib.sha256(key.encode() + code).digest()


def _read_whole(folder: int, name: str) -> tuple[bytes, float]:
    """A file's content, and its age in seconds. Raises OSError."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW, dir_fd=folder)

    with open(name, "rb", opener=opener) as file:
        return file.read(), time.time() - os.fstat(file.fileno()).st_mtime


def _write_whole(folder: int, name: str, content: bytes) -> None:
    """Write a file under another name, then rename it. Raises OSError; leaves no part of it."""
    temporary = f"tmp-{os.getpid()}-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(file)  # or the name may outlive a crash of the machine, and the content not
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _remove_unused(folder: int) -> None:
    """Old entries, and files whose writer died. Raises OSError."""
    now = time.time()
    with os.scandir(folder) as listed:
        for found in listed:
            if found.name.endswith(".kernel"):
                limit_s = _UNUSED_S
            elif found.name.startswith("tmp-"):
                limit_s = _LEFTOVER_S
            else:
                continue
            with contextlib.suppress(FileNotFoundError):  # another process removed it first
                if now - found.stat(follow_symlinks=False).st_mtime > limit_s:
                    os.unlink(found.name, dir_fd=folder)


def _lock_by(file: int, deadline: float) -> bool:
    """Take the lock of an open file; False if it was held until the deadline. Raises OSError."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
