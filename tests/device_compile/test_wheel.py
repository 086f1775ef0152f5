"""The wheel: it holds what kernels are compiled from, and compiles them where no compiler is.

The wheel is built apart from the editable install and put into a fresh environment, which borrows
every other package from the one that runs the tests.
"""

from __future__ import annotations

import json
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.device_compile.toolchain import KERNELS, ROOT

FOLDERS = {"fastkern": "fastkern", "planner": "fastkern/planner", "kernels": "fastkern/kernels"}
DEVICE_SUFFIXES = (".h", ".cu", ".hip")
COMPILERS = ("c++", "g++", "gcc", "cc", "cpp", "clang", "clang++", "nvcc", "hipcc", "ptxas", "ld")

# What a user's program does, and a report of it. Not from the repository, which is not in sys.path.
PROGRAM = """
import json, shutil, sys
import fastkern
from fastkern.device.compile import compile_entry
from fastkern.device.sources import entry_names, include_root, read_entry

code = {name: compile_entry(name, "cuda", "sm_90") for name in entry_names("cuda")}
assert all(found.startswith(b"\\x7fELF") for found in code.values())
json.dump(
    {
        "fastkern": fastkern.__file__,
        "root": str(include_root()),
        "compilers": [name for name in json.loads(sys.argv[1]) if shutil.which(name)],
        "kernels": {n: [k for k in json.loads(sys.argv[2]) if k.encode() in code[n]] for n in code},
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
    """Built once for these tests, its extension modules not optimised, which takes a third less."""
    folder = tmp_path_factory.mktemp("wheel")
    run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"),
            *("--no-build-isolation", "--no-deps", "--no-cache-dir", "-w", str(folder)),
            f"--config-settings=build-dir={folder / 'build'}",
            "--config-settings=cmake.build-type=Debug",
            "--config-settings=cmake.define.CMAKE_CXX_FLAGS_DEBUG=-O0",
            str(ROOT),
        ]
    )
    (built,) = folder.glob("*.whl")
    return built


def borrow_packages(packages: Path) -> None:
    """Link all other packages that are installed here. Not by a path in a .pth file: libraries of
    NVIDIA's wheels are looked for in the environment's own folder only."""
    for folder in map(Path, site.getsitepackages()):
        for found in folder.iterdir() if folder.is_dir() else ():
            own = found.name.lstrip("_").startswith("fastkern") or found.suffix == ".pth"
            if not own and not (packages / found.name).exists():
                (packages / found.name).symlink_to(found)


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
    kept = home / ".cache" / "fastkern" / "kernels"
    assert len(list(kept.glob("*.kernel"))) == len(entries)
    assert kept.stat().st_mode & 0o077 == 0
