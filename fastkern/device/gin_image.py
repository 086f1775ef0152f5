"""The image of nccl_gin's kernels that came with fastkern, for machines without nvcc.

make_gin_image.py makes it when a wheel is built. Beside it lies what it was made from and for.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from .make_gin_image import DESCRIPTION, FORMAT, IMAGE
from .sources import EntrySource

FOLDER = "kernels/prebuilt"


@dataclass(frozen=True)
class GinImage:
    """path: a fatbin. nccl_version: 23203. arches: 90 for sm_90, code that runs as it is; the
    driver compiles for newer ones than ptx_arch. files: SHA-256 by path of the sources."""

    path: Path
    nccl_version: int
    arches: tuple[int, ...]
    ptx_arch: int
    files: dict[str, str]

    def fault(self, source: EntrySource, arch: str, defines: dict[str, str]) -> str | None:
        """Why it is not what is asked for; None where it is. arch: "sm_90"."""
        if defines:
            return "the image that came with fastkern was made without macros"
        number = int(re.sub(r"\D", "", arch))
        # Code for an architecture runs on later ones of the same generation.
        runs = any(made // 10 == number // 10 and made <= number for made in self.arches)
        if not runs and number < self.ptx_arch:
            names = ", ".join(f"sm_{made}" for made in self.arches)
            return f"the image that came with fastkern is for {names} and newer, not for {arch}"
        for path, digest in self.files.items():
            text = source.files.get(path)
            if text is None or hashlib.sha256(text.encode()).hexdigest() != digest:
                return f"the image that came with fastkern was made from another {path}"
        return None


def read_gin_image(root: Path) -> GinImage | str:
    """What lies in kernels/prebuilt below root; or why it is of no use."""
    folder = root / FOLDER
    try:
        held = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        image = GinImage(
            folder / IMAGE,
            int(held["nccl_version"]),
            tuple(map(int, held["arches"])),
            int(held["ptx_arch"]),
            {str(path): str(digest) for path, digest in held["files"].items()},
        )
        form, digest = held["format"], held["sha256"]
        whole = hashlib.sha256(image.path.read_bytes()).hexdigest() == digest
    except FileNotFoundError:
        return "no image of it came with this fastkern"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"the image in {folder} cannot be read ({error!r})"
    if form != FORMAT or not whole or not image.files:
        return f"the image in {folder} is damaged, or another fastkern's"
    return image
