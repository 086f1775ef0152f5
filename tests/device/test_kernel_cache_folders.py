"""The cache's folder: such as are not used, writes that fail, what is removed, the user's own."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastkern.config import read_cache_dir
from fastkern.device import compile as device_compile
from fastkern.device.kernel_cache import KernelCache, key_of
from tests.device.compile_cases import KEY, OTHER, Maker, entry_of, warnings_of


def folder_below_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.parent.write_text("a file\n")
    return "kernels are not kept on disk"


def folder_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir(mode=0o700, parents=True)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    return f"belongs to user {own}, not to {own + 1}"


def folder_of_a_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir(parents=True)
    folder.chmod(0o770)
    return f"others may write to {folder}; `chmod 700` it"


def folder_of_everybody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir(parents=True)
    folder.chmod(0o1707)
    return f"others may write to {folder}; `chmod 700` it"


def folder_through_a_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.parent.mkdir()
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")
    return "kernels are not kept on disk"


@pytest.mark.parametrize(
    "prepare",
    [
        folder_below_a_file,
        folder_of_another_user,
        folder_of_a_group,
        folder_of_everybody,
        folder_through_a_link,
    ],
)
def test_a_folder_that_is_not_used(
    prepare: Callable[[Path, pytest.MonkeyPatch], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "cache" / "kernels"
    warning = prepare(folder, monkeypatch)
    cache, make = KernelCache(folder), Maker()
    assert [cache.get(KEY, make), cache.get(KEY, make), cache.get(OTHER, make)] == [b"code"] * 3
    assert make.calls == 2  # one of each key: kept in memory
    assert len(warnings_of(caplog)) == 1
    assert warning in warnings_of(caplog)[0]
    assert not list(tmp_path.rglob("*.kernel"))


def test_entries_in_a_folder_of_another_user_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "kernels"
    KernelCache(folder).get(KEY, Maker(b"theirs"))
    folder_of_another_user(tmp_path / "unused", monkeypatch)
    assert KernelCache(folder).get(KEY, Maker(b"ours")) == b"ours"


def test_no_folder(caplog: pytest.LogCaptureFixture) -> None:
    cache, make = KernelCache(None), Maker()
    assert cache.get(KEY, make) == cache.get(KEY, make) == b"code"
    assert make.calls == 1
    assert len(warnings_of(caplog)) == 1


def test_a_folder_that_can_only_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kernels"
    KernelCache(folder).get(KEY, Maker())
    old = time.time() - 30 * 24 * 3600
    os.utime(entry_of(folder), (old, old))
    really_open = os.open

    def open_to_read(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return really_open(path, flags, *arguments, **named)

    def refuse(*arguments: Any, **named: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", open_to_read)
    monkeypatch.setattr(os, "utime", refuse)
    cache, make = KernelCache(folder), Maker(b"new")
    assert cache.get(KEY, make) == b"code"
    assert warnings_of(caplog) == []
    third = key_of(test=["third"])
    assert [cache.get(OTHER, make), cache.get(third, make), cache.get(OTHER, make)] == [b"new"] * 3
    assert make.calls == 2
    assert len(warnings_of(caplog)) == 1
    assert "cannot be kept" in warnings_of(caplog)[0]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        assert KernelCache(tmp_path / "kernels").get(KEY, Maker()) == b"code"
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == [f"lock-{KEY[0]}"]
    assert len(warnings_of(caplog)) == 1
    assert os.strerror(errno.ENOSPC) in warnings_of(caplog)[0]
    again = Maker()
    KernelCache(tmp_path / "kernels").get(KEY, again)
    assert again.calls == 1
    assert entry_of(tmp_path / "kernels").exists()


def test_unused_entries_and_leftovers_go(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    day_s = 24 * 3600
    ages_s = {
        "old.kernel": 91 * day_s,
        "recent.kernel": 89 * day_s,
        "tmp-1-dead": 2 * 3600,
        "tmp-2-alive": 60,
        "lock-f": 1000 * day_s,
        "somebody's": 1000 * day_s,
    }
    KernelCache(folder).get(KEY, Maker())
    now = time.time()
    for name, age_s in ages_s.items():
        (folder / name).touch()
        os.utime(folder / name, (now - age_s, now - age_s))
    os.utime(entry_of(folder), (now - 89 * day_s, now - 89 * day_s))

    unread = Maker()
    KernelCache(folder).get(KEY, unread)  # a use, which counts from now on
    assert unread.calls == 0
    assert now - entry_of(folder).stat().st_mtime < day_s
    assert {path.name for path in folder.iterdir()} >= set(ages_s)  # reading removes nothing
    KernelCache(folder).get(OTHER, Maker())
    assert {path.name for path in folder.iterdir()} == {
        *(name for name in ages_s if name not in ("old.kernel", "tmp-1-dead")),
        *(entry_of(folder, key).name for key in (KEY, OTHER)),
        *(f"lock-{key[0]}" for key in (KEY, OTHER)),
    }


@pytest.mark.parametrize("with_platformdirs", [True, False])
def test_the_users_cache_folder(with_platformdirs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_platformdirs:
        monkeypatch.setitem(sys.modules, "platformdirs", None)
    for name in ("FASTKERN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    home = Path("/home/somebody")
    assert read_cache_dir() == home / ".cache" / "fastkern"
    for given, expected in (("/cache", Path("/cache")), ("", home / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert read_cache_dir() == expected / "fastkern"
    monkeypatch.setenv("FASTKERN_CACHE_DIR", " ~/kernels ")
    assert read_cache_dir() == home / "kernels"
    monkeypatch.setenv("FASTKERN_CACHE_DIR", "here")
    assert read_cache_dir() == Path.cwd() / "here"
    monkeypatch.setenv("FASTKERN_CACHE_DIR", "~nobody-of-that-name/kernels")
    with pytest.raises(ValueError, match="FASTKERN_CACHE_DIR"):
        read_cache_dir()


def test_the_default_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERN_CACHE_DIR", str(tmp_path / "mine"))
    device_compile.default_cache.cache_clear()
    try:
        device_compile.default_cache().get(KEY, Maker())
    finally:
        device_compile.default_cache.cache_clear()
    assert entry_of(tmp_path / "mine" / "kernels").exists()
