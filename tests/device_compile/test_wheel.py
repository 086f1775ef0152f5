"""The wheel: it holds what kernels are compiled from, and compiles them where no compiler is.

The wheel is built apart from the editable install and put into a fresh environment, which borrows
every other package from the one that runs the tests.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fastkern.device.libraries import read_macro
from tests.device_compile.toolchain import KERNELS, ROOT
from tests.device_compile.transport_builds import KERNELS as NETWORK_KERNELS
from tests.device_compile.transport_builds import wheel_file

FOLDERS = {"fastkern": "fastkern", "planner": "fastkern/planner", "kernels": "fastkern/kernels"}
DEVICE_SUFFIXES = (".h", ".cu", ".hip")
PREBUILT = "fastkern/kernels/prebuilt/nccl_gin.fatbin"
COMPILERS = ("c++", "g++", "gcc", "cc", "cpp", "clang", "clang++", "nvcc", "hipcc", "ptxas", "ld")

# What a user's program does, and a report of it. Not from the repository, which is not in sys.path.
PROGRAM = """
import hashlib, json, shutil, sys
import fastkern
from fastkern.device.compile import compile_entry
from fastkern.device.compile_gin import find_tools, nccl_version_of_image
from fastkern.device.sources import entry_names, include_root, read_entry
from fastkern.errors import DeviceUnavailableError

gin = [compile_entry(n, "cuda", "sm_90", transport="nccl_gin") for n in ("exchange", "combine")]
try:
    compile_entry("exchange", "cuda", "sm_80", transport="nccl_gin")
    other = ""
except DeviceUnavailableError as error:
    other = str(error)
code = {name: compile_entry(name, "cuda", "sm_90") for name in entry_names("cuda")}
assert all(found.startswith(b"\\x7fELF") for found in code.values())
json.dump(
    {
        "fastkern": fastkern.__file__,
        "root": str(include_root()),
        "compilers": [name for name in json.loads(sys.argv[1]) if shutil.which(name)],
        "kernels": {n: [k for k in json.loads(sys.argv[2]) if k.encode() in code[n]] for n in code},
        "gin_tools": str(find_tools()),
        "gin": [hashlib.sha256(image).hexdigest() for image in gin],
        "gin_nccl": nccl_version_of_image(),
        "gin_other": other,
        "hip": {name: len(read_entry(name, "hip").files) for name in entry_names("hip")},
    },
    sys.stdout,
)
"""


def run(command: list[str], **options: object) -> str:
    """Its output. Fails the test with it where the command fails."""
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **options,  # type: ignore[call-overload]
    )
    if result.returncode != 0:
        pytest.fail(f"{' '.join(command[:6])} ...\n{result.stdout}\n{result.stderr}")
    return str(result.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once for these tests, its extension modules not optimised, which takes a third less.

    With the kernels of nccl_gin for one architecture.
    """
    folder = tmp_path_factory.mktemp("wheel")
    run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"),
            *("--no-build-isolation", "--no-deps", "--no-cache-dir", "-w", str(folder)),
            f"--config-settings=build-dir={folder / 'build'}",
            "--config-settings=cmake.build-type=Debug",
            "--config-settings=cmake.define.CMAKE_CXX_FLAGS_DEBUG=-O0",
            "--config-settings=cmake.define.FASTKERN_PREBUILD_GIN=ON",
            "--config-settings=cmake.define.FASTKERN_PREBUILD_GIN_ARCHES=90",
            str(ROOT),
        ]
    )
    (built,) = folder.glob("*.whl")
    return built


def borrow_packages(packages: Path) -> None:
    """Link all other packages that are installed here, but no nvcc. Not by a path in a .pth file:
    libraries of NVIDIA's wheels are looked for in the environment's own folder only."""
    for folder in map(Path, site.getsitepackages()):
        for found in folder.iterdir() if folder.is_dir() else ():
            own = found.name.lstrip("_").startswith("fastkern") or found.suffix == ".pth"
            if not own and not (packages / found.name).exists():
                (packages / found.name).symlink_to(found)
    for folder in (packages / "nvidia", packages / "nvidia/cu13"):  # links to folders of links
        held = list(folder.resolve().iterdir())
        folder.unlink()
        folder.mkdir()
        for found in held:
            if found.name not in ("bin", "nvvm"):
                (folder / found.name).symlink_to(found)


def test_the_wheel_holds_sources_for_devices(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    found = {
        f"{target}/{path.relative_to(ROOT / folder)}": path
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (*DEVICE_SUFFIXES, ".py") and "__pycache__" not in path.parts
    }
    for entry in KERNELS:
        assert {f"fastkern/{entry}.cu", f"fastkern/{entry}.hip"} <= set(found)
    assert "fastkern/planner/stage_table.h" in found
    assert [name for name in found if name not in held] == []
    different = [name for name, path in found.items() if held[name] != path.read_bytes()]
    assert different == []
    assert [name for name in held if name.endswith(".cc") or "__pycache__" in name] == []
    assert "fastkern/py.typed" in held
    images = [name for name in held if name.startswith("fastkern/kernels/prebuilt/")]
    assert sorted(images) == [PREBUILT, PREBUILT.replace(".fatbin", ".json")]


def test_the_wheel_holds_nccl_gins_kernels(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        image = archive.extract(PREBUILT, tmp_path)
    tool = wheel_file("nvidia-cuda-cuobjdump", "bin/cuobjdump")
    listed = run([str(tool), "-symbols", image])
    found = re.findall(r"^\S+ +GLOBAL +\S+ +ENTRY +(\S+)$", listed, re.MULTILINE)
    assert sorted(found) == sorted(NETWORK_KERNELS)
    for kind in ("elf", "ptx"):
        listed = run([str(tool), f"-l{kind}", image])
        assert re.findall(r"\.(sm_\w+)\.\w+$", listed, re.MULTILINE) == ["sm_90"], listed


def test_kernels_compile_where_no_compiler_is(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)])
    (packages,) = environment.glob("lib/python*/site-packages")
    borrow_packages(packages)

    empty, home, elsewhere = tmp_path / "bin", tmp_path / "home", tmp_path / "elsewhere"
    for folder in (empty, home, elsewhere):
        folder.mkdir()
    assert shutil.which("c++"), "there is one to hide, or nothing is shown"
    kernels = sorted(kernel for names in KERNELS.values() for kernel in names)
    output = run(
        [str(python), "-c", PROGRAM, json.dumps(COMPILERS), json.dumps(kernels)],
        cwd=elsewhere,
        env={"PATH": str(empty), "HOME": str(home)},
    )
    report = json.loads(output)
    assert report["compilers"] == []
    assert Path(report["fastkern"]) == packages / "fastkern" / "__init__.py"
    assert Path(report["root"]).samefile(packages / "fastkern")
    entries = {Path(entry).name: sorted(names) for entry, names in KERNELS.items()}
    assert report["kernels"] == entries
    assert set(report["hip"]) == set(entries)
    assert min(report["hip"].values()) > 3

    # Without nvcc, or without what it needs, nccl_gin's kernels are those that came with the wheel.
    assert re.search(r"^there is no nvcc|no g\+\+ on the PATH$", report["gin_tools"])
    prebuilt = (packages / PREBUILT).read_bytes()
    assert report["gin"] == [hashlib.sha256(prebuilt).hexdigest()] * 2
    header = wheel_file("nvidia-nccl-cu13", "nccl/include/nccl.h")
    assert report["gin_nccl"] == read_macro(header, "NCCL_VERSION_CODE")
    assert "is for sm_90 and newer, not for sm_80" in report["gin_other"]

    kept = home / ".cache" / "fastkern" / "kernels"
    assert len(list(kept.glob("*.kernel"))) == len(entries)
    assert kept.stat().st_mode & 0o077 == 0
