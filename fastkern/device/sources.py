"""The kernels' sources: where they lie, and which files belong to an entry.

They are part of the package, since kernels are compiled on the machine that runs them. The include
directory of "planner/..." and "kernels/..." is the parent of the folder that fastkern.planner was
imported from: site-packages/fastkern of a wheel, the repository of an editable install.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .. import planner

SUFFIXES = {"cuda": ".cu", "hip": ".hip"}
# Transports between servers, each with the target that it is for. All kernels that move rows lie in
# one file of a transport's own; the others know of no transport.
NETWORKS = {"nvshmem": "cuda", "nccl_gin": "cuda", "rocshmem": "hip"}
MOVING = ("combine", "dispatch", "exchange")
_FOLDER = "kernels/entry"
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[ \t]*(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class EntrySource:
    """An entry and all that it includes.

    name: "exchange", or "network/nvshmem". target: "cuda" or "hip". path: of the entry, below root.
    root: the include directory. files: texts by path below root, as `#include` spells it, the
    entry's among them. libraries: headers of a network's library that are included, sorted.
    """

    name: str
    target: str
    path: str
    root: Path
    files: dict[str, str]
    libraries: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The entry's own text."""
        return self.files[self.path]

    @property
    def file_name(self) -> str:
        """What compilers call it in their messages: "exchange.cu"."""
        return self.path.rpartition("/")[2]


def include_root() -> Path:
    """The directory that holds planner/ and kernels/."""
    assert planner.__file__ is not None
    return Path(planner.__file__).resolve().parents[1]


def entry_names(target: str, root: Path | None = None) -> list[str]:
    """Entries that there are for "cuda" or "hip", sorted. Raises ValueError for other targets."""
    if target not in SUFFIXES:
        raise ValueError(f"target must be one of {', '.join(SUFFIXES)}, not {target!r}")
    folder = (root or include_root()) / _FOLDER
    return sorted(path.stem for path in folder.glob(f"*{SUFFIXES[target]}"))


def image_name(entry: str, transport: str) -> str:
    """What holds an entry's kernels for a transport: "exchange", or "network/nvshmem".

    Entries with the same name are one image, which is to be loaded once. Raises ValueError for an
    unknown transport.
    """
    if transport != "peer" and transport not in NETWORKS:
        names = ", ".join(("peer", *NETWORKS))
        raise ValueError(f"transport must be one of {names} on devices, not {transport!r}")
    return f"network/{transport}" if transport in NETWORKS and entry in MOVING else entry


def read_entry(name: str, target: str, root: Path | None = None) -> EntrySource:
    """Read an entry and, textually, what it includes, also in branches that are not compiled.

    Device code includes files of its own only, by their path below root. Raises ValueError for an
    entry that does not exist and for any other `#include`; FileNotFoundError names the includer.
    """
    root = root or include_root()
    names = entry_names(target, root)
    if name not in names:
        raise ValueError(f"no entry {name!r} for {target} in {root}; there are: {', '.join(names)}")
    return _follow(name, target, root, of_library=None)


def read_network_entry(transport: str, root: Path | None = None) -> EntrySource:
    """The entry of a transport between servers, which may include headers of a library as well.

    Those are named by <...>, or by a macro FASTKERN_..., which is left alone. Raises as read_entry.
    """
    name = image_name("exchange", transport)
    if transport not in NETWORKS:
        raise ValueError(f"{transport} has no entry of its own")
    pattern = re.compile(r"<([^>]+)>|(FASTKERN_\w+)")
    return _follow(name, NETWORKS[transport], root or include_root(), of_library=pattern)


def _follow(name: str, target: str, root: Path, of_library: re.Pattern[str] | None) -> EntrySource:
    path = f"{_FOLDER}/{name}{SUFFIXES[target]}"
    files = {path: _read(root, path)}
    libraries: set[str] = set()
    unread = [path]
    while unread:
        includer = unread.pop()
        for what in _INCLUDE.findall(files[includer]):
            found = re.match(r'"([^"]+)"', what)
            if found is None:
                other = None if of_library is None else of_library.match(what)
                if other is None:
                    text = f'{includer}: #include {what}; device code includes "..." only'
                    raise ValueError(text)
                libraries.update(other.groups(default="")[:1])
                continue
            included = found[1]
            if included not in files:
                try:
                    files[included] = _read(root, included)
                except FileNotFoundError:
                    text = f"{root / included}, which {includer} includes"
                    raise FileNotFoundError(text) from None
                unread.append(included)
    libraries.discard("")
    return EntrySource(name, target, path, root, files, tuple(sorted(libraries)))


def _read(root: Path, path: str) -> str:
    return (root / path).read_text(encoding="utf-8")
