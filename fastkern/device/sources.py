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
_FOLDER = "kernels/entry"
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[ \t]*(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class EntrySource:
    """An entry and all that it includes.

    name: "exchange". target: "cuda" or "hip". path: of the entry, below root. root: the include
    directory. files: texts by path below root, as `#include` spells it, the entry's among them.
    """

    name: str
    target: str
    path: str
    root: Path
    files: dict[str, str]

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


def read_entry(name: str, target: str, root: Path | None = None) -> EntrySource:
    """Read an entry and, textually, what it includes, also in branches that are not compiled.

    Device code includes files of its own only, by their path below root. Raises ValueError for an
    entry that does not exist and for any other `#include`; FileNotFoundError names the includer.
    """
    root = root or include_root()
    names = entry_names(target, root)
    if name not in names:
        raise ValueError(f"no entry {name!r} for {target} in {root}; there are: {', '.join(names)}")
    path = f"{_FOLDER}/{name}{SUFFIXES[target]}"
    files = {path: _read(root, path)}
    unread = [path]
    while unread:
        includer = unread.pop()
        for what in _INCLUDE.findall(files[includer]):
            found = re.match(r'"([^"]+)"', what)
            if found is None:
                raise ValueError(f'{includer}: #include {what}; device code includes "..." only')
            included = found[1]
            if included not in files:
                try:
                    files[included] = _read(root, included)
                except FileNotFoundError:
                    text = f"{root / included}, which {includer} includes"
                    raise FileNotFoundError(text) from None
                unread.append(included)
    return EntrySource(name, target, path, root, files)


def _read(root: Path, path: str) -> str:
    return (root / path).read_text(encoding="utf-8")
