"""Compile nccl_gin's kernels to an image for several architectures, and describe it.

Run by CMakeLists.txt when a wheel is built, before there is a package to import: this file needs
the standard library alone. By hand, for an NCCL of one's own:
    python make_gin_image.py --nvcc NVCC --nccl NCCL --root ROOT --output ROOT/kernels/prebuilt
with NCCL's include folder as NCCL, and the folder that holds kernels/ and planner/ as ROOT.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGE = "nccl_gin.fatbin"
DESCRIPTION = "nccl_gin.json"
FORMAT = 1
ENTRY = "kernels/entry/network/nccl_gin.cu"
ARCHES = (80, 90, 100, 120)


def make_image(nvcc: str, nccl: Path, root: Path, output: Path, arches: list[int]) -> None:
    """Write IMAGE and DESCRIPTION into the folder `output`.

    nccl: NCCL's include folder. root: the include directory of the kernels. arches: 90 for sm_90;
    of the newest PTX is kept as well, for later GPUs. Raises subprocess.CalledProcessError with
    nvcc's output on stderr; ValueError for headers without a version.
    """
    root, nccl, output = root.resolve(), nccl.resolve(), output.resolve()
    found = re.search(r"#define\s+NCCL_VERSION_CODE\s+(\d+)", (nccl / "nccl.h").read_text())
    if found is None:
        raise ValueError(f"no NCCL_VERSION_CODE in {nccl / 'nccl.h'}")
    output.mkdir(parents=True, exist_ok=True)
    arches = sorted(set(arches))
    command = [nvcc, "-std=c++17", "-fatbin", "--threads", "0"]
    for arch in arches:
        code = f"[sm_{arch},compute_{arch}]" if arch == arches[-1] else f"sm_{arch}"
        command += ["-gencode", f"arch=compute_{arch},code={code}"]
    with tempfile.TemporaryDirectory(prefix="fastkern-") as folder:
        image, listed = Path(folder, IMAGE), Path(folder, "files.d")
        command += [f"-I{root}", f"-I{nccl}", "-MD", "-MF", str(listed)]
        subprocess.run([*command, str(root / ENTRY), "-o", str(image)], check=True)
        files = {path: (root / path).read_bytes() for path in own_files(listed.read_text(), root)}
        if ENTRY not in files:
            raise ValueError(f"nvcc does not name {ENTRY} among the files it has read")
        content = image.read_bytes()
    description = {
        "format": FORMAT,
        "sha256": hashlib.sha256(content).hexdigest(),
        "nccl_version": int(found[1]),
        "arches": arches,
        "ptx_arch": arches[-1],
        "files": {path: hashlib.sha256(text).hexdigest() for path, text in files.items()},
    }
    (output / IMAGE).write_bytes(content)
    (output / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")


def own_files(listed: str, root: Path) -> list[str]:
    """Files below root in a list of dependencies as compilers write it for make; sorted."""
    _, _, names = listed.replace("\\\n", " ").partition(" : ")
    paths = [re.sub(r"\\(.)", r"\1", name) for name in re.findall(r"(?:\\.|[^\s\\])+", names)]
    resolved = [Path(path).resolve() for path in paths]
    folders = [root / "kernels", root / "planner"]
    own = {path for path in resolved if any(folder in path.parents for folder in folders)}
    return sorted(path.relative_to(root).as_posix() for path in own)


def main() -> None:
    """The command line, see above."""
    parser = argparse.ArgumentParser(description="Compile nccl_gin's kernels to an image.")
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("--nccl", required=True, type=Path, help="NCCL's include folder")
    parser.add_argument("--root", required=True, type=Path, help="holds kernels/ and planner/")
    parser.add_argument("--output", required=True, type=Path, help="a folder")
    parser.add_argument("--arches", nargs="+", type=int, default=list(ARCHES), metavar="90")
    given = parser.parse_args()
    try:
        make_image(given.nvcc, given.nccl, given.root, given.output, given.arches)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"no image of nccl_gin: {error}")


if __name__ == "__main__":
    main()
