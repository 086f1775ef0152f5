"""nccl_gin: what nvcc is asked, when the image that came with fastkern is taken, and what is said
where neither does. nvcc is a program that takes its arguments; tests/device_compile has the real
one."""

from __future__ import annotations

import ast
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastkern.device import compile as device_compile
from fastkern.device import compile_gin, make_gin_image
from fastkern.device.compile import compile_entry
from fastkern.device.compile_gin import LEAST_NCCL, nccl_version_of_image
from fastkern.device.gin_image import FOLDER, GinImage, read_gin_image
from fastkern.device.kernel_cache import KernelCache
from fastkern.device.make_gin_image import DESCRIPTION, ENTRY, IMAGE, make_image, own_files
from fastkern.device.sources import read_network_entry
from fastkern.errors import CompileError, DeviceUnavailableError
from tests.device.compile_cases import FILES
from tests.device.network_doubles import (
    WHEELS,
    Change,
    hide_machine,
    newer,
    write_files,
    write_host_compiler,
    write_nvcc,
)

GIN = '#include "kernels/body/outer.h"\n#include <nccl_device.h>\n'


@dataclass
class Machine:
    """A machine with nvcc, g++ and NCCL of which parts can be taken away; and sources."""

    folder: Path
    wheels: Path
    root: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def nvcc(self) -> Path:
        return self.folder / "bin/nvcc"

    def calls(self) -> list[list[str]]:
        """Arguments of nvcc's calls that were to compile."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [ast.literal_eval(line.rpartition(" [")[0]) for line in lines]

    def compile(
        self, arch: str = "sm_90", defines: dict[str, str] | None = None, folder: str = "cache"
    ) -> bytes:
        cache = KernelCache(self.folder / folder)
        return compile_entry("exchange", "cuda", arch, defines, cache, transport="nccl_gin")

    def make_image(self, arches: tuple[int, ...] = (80, 90)) -> GinImage:
        """As a wheel's build does it, with the sources as they are now."""
        nccl = self.wheels / "nccl/include"
        make_image(str(self.nvcc), nccl, self.root, self.root / FOLDER, list(arches))
        image = read_gin_image(self.root)
        assert isinstance(image, GinImage), image
        return image

    def hide_nvcc(self) -> None:
        self.nvcc.unlink()

    def set_library(self, version: int | None) -> None:
        self.monkeypatch.setattr(compile_gin, "nccl_library_version", lambda: version)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    wheels = write_files(hide_machine(monkeypatch, tmp_path), WHEELS)
    root = write_files(tmp_path / "a tree", {**FILES, ENTRY: GIN})
    monkeypatch.setattr(
        device_compile, "read_network_entry", lambda transport: read_network_entry(transport, root)
    )
    monkeypatch.setattr(compile_gin, "include_root", lambda: root)
    write_nvcc(tmp_path / "bin/nvcc", tmp_path / "log")
    write_host_compiler(tmp_path)
    found = Machine(tmp_path, wheels, root, monkeypatch)
    found.set_library(23203)
    return found


# -- nvcc ------------------------------------------------------------------------------------------


def test_what_nvcc_is_asked(machine: Machine) -> None:
    machine.monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    assert machine.compile("sm_90a", {"B": "", "A": "1"}) == f"image of {GIN}".encode()
    (arguments,) = machine.calls()
    folder = Path(arguments[-3].removesuffix(ENTRY))
    assert arguments == [
        *("-arch=sm_90a", "-std=c++17", "-cubin", "-DA=1", "-DB=", f"-I{folder}"),
        f"-I{machine.wheels / 'nccl/include'}",
        *(str(folder / ENTRY), "-o", str(folder / "image")),
    ]
    assert not folder.exists()
    assert "NVCC_APPEND_FLAGS" not in (machine.folder / "log").read_text()


def test_nvcc_is_taken_where_there_is_an_image_too(machine: Machine) -> None:
    machine.make_image()
    write_files(machine.wheels, {"nccl/include/nccl.h": "#define NCCL_VERSION_CODE 23300\n"})
    machine.compile()
    assert "-cubin" in machine.calls()[-1]
    assert nccl_version_of_image() == 23300


CHANGES: dict[str, Change] = {
    "nothing": lambda folder: None,
    "nvcc": lambda folder: newer(folder / "bin/nvcc"),
    "nccl": lambda folder: newer(folder / "nvidia/nccl/include/nccl_device.h"),
    "source": lambda folder: newer_text(folder / "a tree/planner/table.h"),
    "version": lambda folder: install_behind_the_same_name(folder),
}


def install_behind_the_same_name(folder: Path) -> None:
    """As a script that calls another nvcc now; seen by the next process."""
    nvcc = folder / "bin/nvcc"
    status = nvcc.stat()
    write_nvcc(nvcc, folder / "log", version="V13.1.99")
    os.utime(nvcc, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert nvcc.stat().st_size == status.st_size
    compile_gin._nvcc_version.cache_clear()


def newer_text(path: Path) -> None:
    path.write_text(path.read_text() + "// edited\n")


@pytest.mark.parametrize("change", CHANGES)
def test_nvcc_and_nccl_are_part_of_the_key(change: str, machine: Machine) -> None:
    machine.compile()
    machine.compile()
    assert len(machine.calls()) == 1
    CHANGES[change](machine.folder)
    machine.compile()
    assert len(machine.calls()) == (1 if change == "nothing" else 2)


def test_nvcc_finds_an_error(machine: Machine) -> None:
    write_nvcc(machine.nvcc, machine.folder / "log", fails=True)
    with pytest.raises(CompileError, match=r"thing\.cu\(1\): error: no such thing") as caught:
        machine.compile()
    assert "network/nccl_gin does not compile for cuda sm_90" in str(caught.value)


# -- neither ---------------------------------------------------------------------------------------


def old_headers(machine: Machine) -> None:
    text = "#define NCCL_VERSION_CODE 22809\n"
    write_files(machine.wheels, {"nccl/include/nccl.h": text})


def broken_nvcc(machine: Machine) -> None:
    machine.nvcc.write_text("#!/bin/sh\necho not found; exit 3\n")


def silent_nvcc(machine: Machine) -> None:
    machine.nvcc.write_text("#!/bin/sh\necho hello\n")


MISSING = {
    "nvcc": (Machine.hide_nvcc, "there is no nvcc on the PATH"),
    "g++": (lambda m: (m.folder / "bin/g++").unlink(), r"nvcc needs a host compiler, .* no g\+\+"),
    "nccl": (lambda m: (m.wheels / "nccl/include/nccl_device.h").unlink(), r"no nccl_device\.h"),
    "old nccl": (old_headers, r"NCCL 2\.32\.0 or newer is needed, .* are of 2\.28\.9"),
    "broken": (broken_nvcc, r"nvcc does not run: .*nvcc ended with 3:\nnot found"),
    "no version": (silent_nvcc, "nvcc does not run: no version in what it says: 'hello'"),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_nvcc_needs_is_missing(what: str, machine: Machine) -> None:
    change, match = MISSING[what]
    change(machine)
    with pytest.raises(DeviceUnavailableError, match=match) as caught:
        machine.compile()
    assert "; and no image of it came with this fastkern" in str(caught.value)
    assert "`pip install 'fastkern[gin]'` installs nvcc and NCCL; nvcc needs g++" in str(
        caught.value
    )
    with pytest.raises(DeviceUnavailableError, match=match):
        nccl_version_of_image()
    assert machine.calls() == []


@pytest.mark.parametrize("what", MISSING)
def test_the_image_stands_in(what: str, machine: Machine) -> None:
    image = machine.make_image()
    MISSING[what][0](machine)
    assert machine.compile() == image.path.read_bytes() == f"image of {GIN}".encode()
    assert nccl_version_of_image() == 23203
    assert not (machine.folder / "cache").exists()


# -- the image -------------------------------------------------------------------------------------


def test_an_image_is_described(machine: Machine) -> None:
    image = machine.make_image((100, 90))
    assert (image.nccl_version, image.arches, image.ptx_arch) == (23203, (90, 100), 100)
    texts = {**FILES, ENTRY: GIN}
    names = (ENTRY, "kernels/body/outer.h", "planner/table.h")
    digests = {name: hashlib.sha256(texts[name].encode()).hexdigest() for name in names}
    assert image.files == digests
    (arguments,) = machine.calls()
    assert arguments[:7] == [
        *("-std=c++17", "-fatbin", "--threads", "0"),
        *("-gencode", "arch=compute_90,code=sm_90", "-gencode"),
    ]
    assert arguments[7] == "arch=compute_100,code=[sm_100,compute_100]"
    assert (image.path.name, image.path.parent) == (IMAGE, machine.root / "kernels/prebuilt")


def test_files_below_the_root_are_found_in_a_list(tmp_path: Path) -> None:
    root = tmp_path / "a b"
    names = [f"{root}/kernels/x.h", f"{root}/kernels/../planner/y.h", f"{root}/other/z.h", "/u/v.h"]
    escaped = [name.replace(" ", "\\ ") for name in names]
    listed = f"out : {escaped[0]} \\\n  {escaped[1]} {escaped[2]} \\\n  {escaped[3]}\n"
    assert own_files(listed, root) == ["kernels/x.h", "planner/y.h"]


@pytest.mark.parametrize(
    ("arch", "fits"),
    [
        *(("sm_80", True), ("sm_86", True), ("sm_90", True), ("sm_90a", True), ("sm_100", False)),
        *(("sm_103", False), ("sm_120", True), ("sm_121", True), ("sm_130", True)),
        ("sm_75", False),
    ],
)
def test_architectures_of_an_image(arch: str, fits: bool, machine: Machine) -> None:
    """Code runs on later ones of its generation; the newest's is compiled for all that come."""
    machine.make_image((80, 90, 120))
    machine.hide_nvcc()
    if fits:
        assert machine.compile(arch)
    else:
        text = f"is for sm_80, sm_90, sm_120 and newer, not for {arch}"
        with pytest.raises(DeviceUnavailableError, match=text):
            machine.compile(arch)


@pytest.mark.parametrize(
    ("library", "match"),
    [
        (None, r"is for NCCL 2\.32\.3 and newer 2\.x, and there is no NCCL here"),
        (23202, r"is for NCCL 2\.32\.3 and newer 2\.x, and NCCL here is 2\.32\.2"),
        (30000, r"NCCL here is 3\.0\.0"),
        (23203, None),
        (23400, None),
    ],
)
def test_nccl_must_fit_the_image(library: int | None, match: str | None, machine: Machine) -> None:
    machine.make_image()
    machine.hide_nvcc()
    machine.set_library(library)
    if match is None:
        assert machine.compile()
    else:
        with pytest.raises(DeviceUnavailableError, match=match) as caught:
            machine.compile()
        assert "there is no nvcc on the PATH" in str(caught.value)


@pytest.mark.parametrize("path", [ENTRY, "kernels/body/outer.h", "planner/table.h"])
def test_an_image_of_other_sources_is_not_taken(path: str, machine: Machine) -> None:
    machine.make_image()
    machine.hide_nvcc()
    newer_text(machine.root / "planner/unused.h")
    assert machine.compile()
    newer_text(machine.root / path)
    with pytest.raises(DeviceUnavailableError, match=f"was made from another {path}"):
        machine.compile()


def test_architectures_are_checked_before_images(machine: Machine) -> None:
    machine.make_image()
    machine.hide_nvcc()
    with pytest.raises(ValueError, match='arch must be written like "sm_90"'):
        machine.compile("compute_90")


def test_an_image_of_nothing_is_not_made(machine: Machine) -> None:
    machine.monkeypatch.setattr(make_gin_image, "own_files", lambda listed, root: [])
    with pytest.raises(ValueError, match="nvcc does not name"):
        machine.make_image()
    assert not list((machine.root / FOLDER).iterdir())


def test_an_image_has_no_macros(machine: Machine) -> None:
    machine.make_image()
    machine.hide_nvcc()
    with pytest.raises(DeviceUnavailableError, match="was made without macros"):
        machine.compile(defines={"A": "1"})


DAMAGES: dict[str, tuple[Change, str]] = {
    "image": (lambda folder: newer_text(folder / IMAGE), "is damaged"),
    "no image": (lambda folder: (folder / IMAGE).unlink(), "no image of it came"),
    "text": (lambda folder: newer_text(folder / DESCRIPTION), "cannot be read .*Extra data"),
    "list": (lambda folder: (folder / DESCRIPTION).write_text("[]"), "cannot be read"),
    "format": (lambda folder: change_description(folder, format=2), "another fastkern's"),
    "files": (lambda folder: change_description(folder, files={}), "is damaged"),
    "number": (lambda folder: change_description(folder, nccl_version="x"), "cannot be read"),
}


def change_description(folder: Path, **fields: object) -> None:
    path = folder / DESCRIPTION
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_image_is_not_taken(damage: str, machine: Machine) -> None:
    machine.make_image()
    machine.hide_nvcc()
    change, match = DAMAGES[damage]
    change(machine.root / FOLDER)
    with pytest.raises(DeviceUnavailableError, match=match):
        machine.compile()


def test_the_build_looks_for_the_same_nccl() -> None:
    text = (Path(__file__).parents[2] / "CMakeLists.txt").read_text()
    assert f"if(nccl_version LESS {LEAST_NCCL})" in text
