"""An entry's kernels in Triton for a device: from the cache of compiled kernels, or compiled now.

Triton compiles ahead of time, by its own tools: neither a GPU nor the bindings are needed. What it
writes into its own cache goes into a folder that is gone afterwards. That is set in the whole
process (Triton has no other way), so another thread that compiles at the same moment may find its
own kernels compiled again later.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CompileError, DeviceUnavailableError
from ..version import __version__
from .compile import default_cache
from .driver import MOST_SHARED_BYTES
from .kernel_cache import KernelCache, key_of
from .records import DTYPES
from .triton_image import TritonImage, TritonKernel, pack_image
from .triton_library import import_triton, interpreting
from .triton_network import extern_libs, identity_of, undefined
from .triton_parameters import check_parameters, read_parameters
from .virtual_kernels import TEAM_LANES, check_lanes

log = logging.getLogger("fastkern")

_one_at_a_time = threading.Lock()  # what is set for the whole process is set for one
_ARCHES = {"cuda": r"sm_(\d{2,3})", "hip": r"gfx9[0-9a-f]{2}"}  # other GPUs of AMD have waves of 32
_BINARIES = {"cuda": ("ptx", "cubin"), "hip": ("amdgcn", "hsaco")}
_KINDS = {4: "i32", 8: "i64"}  # of a record's fields
# No pipelines: rows are written for others to see, and none are computed with. No contraction: sums
# are the same bit by bit on every target.
_OPTIONS = {"num_stages": 1, "enable_fp_fusion": False}
# Of a lane, on NVIDIA: left alone, ptxas rather spills than use more than 128.
_MOST_REGISTERS = 168
_MORE_REGISTERS = {"dispatch": 240, "combine": 255}  # by entry; one block a multiprocessor so or so
_REGISTERS_WITH_LIBRARY = 255  # of what is linked with one between servers
_REGISTERS = 65536  # of a multiprocessor


def compile_triton(
    entry: str,
    target: str,
    arch: str,
    num_lanes: int,
    constants: Mapping[str, int],
    cache: KernelCache | None = None,
) -> bytes:
    """The image (`triton_image`) of an entry's kernels for blocks of num_lanes lanes.

    entry: of kernels/triton/entry.py. target, arch: ("cuda", "sm_90"), ("hip", "gfx942").
    constants: of the kernels' constexpr parameters. cache: the process's own by default.
    No GPU is needed. Raises ValueError for what is unknown, DeviceUnavailableError where Triton is
    missing, too old or told to interpret, CompileError with what Triton said, or where a kernel is
    not such as it must be.
    """
    triton = import_triton()
    warps = _check(target, arch, num_lanes)
    if interpreting():
        raise DeviceUnavailableError(
            "TRITON_INTERPRET is set: kernels in Triton are interpreted in this process and cannot "
            f"be compiled for {target} {arch}; start it without"
        )
    from ..kernels.triton import entry as entries
    from ..kernels.triton import layout

    if entry not in entries.ENTRIES:
        raise ValueError(f"no entry {entry!r} in Triton; there are: {', '.join(entries.ENTRIES)}")
    given = dict(sorted(constants.items()))
    found = _gpu_target(target, arch)
    transport = _transport_of(given)
    if transport != "peer" and target != "cuda":
        raise ValueError(f"the kernels in Triton know no {transport} on {target}")
    libraries = {} if transport == "peer" else extern_libs(transport, arch)

    def compile_now() -> bytes:
        start = time.monotonic()
        kernels = []
        with _one_at_a_time, _leaving_nothing(triton):
            for name in entries.ENTRIES[entry]:
                try:
                    kernels.append(_compile(triton, entry, name, found, warps, given, libraries))
                except CompileError as error:
                    raise CompileError(entry, target, arch, error.log) from None
                except Exception as error:
                    raise CompileError(entry, target, arch, f"{name}: {error}") from error
        log.info(
            "compiled %s for %s %s, %d lanes, with Triton %s in %.1f s",
            *(entry, target, arch, num_lanes, triton.__version__, time.monotonic() - start),
        )
        return pack_image(TritonImage(target, arch, given, tuple(kernels)))

    key = key_of(
        fastkern=[__version__],
        compiler=["triton", triton.__version__, *_tools(triton, found)],
        target=[target, arch],
        lanes=[str(num_lanes)],
        options=[
            *(f"{name}={value}" for name, value in sorted(_OPTIONS.items())),
            f"registers={_MORE_REGISTERS.get(entry, _MOST_REGISTERS)},{_REGISTERS_WITH_LIBRARY}",
        ],
        libraries=[] if transport == "peer" else identity_of(transport, arch),
        constants=[f"{name}={value}" for name, value in given.items()],
        entry=[entry, *entries.ENTRIES[entry]],
        layout=[layout.DIGEST],
        files=[text for file in sorted(sources().items()) for text in file],
    )
    return (cache or default_cache()).get(key, compile_now)


def sources() -> dict[str, str]:
    """Texts of all files of kernels/triton, by name."""
    from ..kernels import triton as kernels

    assert kernels.__file__ is not None
    folder = Path(kernels.__file__).parent
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}


def options_of(
    target: Any,
    warps: int,
    entry: str = "exchange",
    libraries: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What an entry's kernels are compiled with. target: Triton's GPUTarget. libraries: what they
    are linked with, by name."""
    options: dict[str, Any] = {"num_warps": warps, **_OPTIONS}
    if libraries:
        options["extern_libs"] = dict(libraries)
    if target.backend == "cuda":
        lanes = warps * target.warp_size
        most = _MORE_REGISTERS.get(entry, _MOST_REGISTERS)
        if libraries:
            most = max(most, _REGISTERS_WITH_LIBRARY)
        options["maxnreg"] = min(most, _REGISTERS // lanes // 8 * 8)
    return options


def _transport_of(constants: Mapping[str, int]) -> str:
    """By what stands for it among a kernel's constants."""
    from ..kernels.triton.entry import TRANSPORTS

    number = constants.get("TRANSPORT", TRANSPORTS["peer"])
    names = [name for name, known in TRANSPORTS.items() if known == number and name != "shared"]
    if not names:
        raise ValueError(f"no transport {number} on devices; there are: {TRANSPORTS}")
    return names[0]


def _check(target: str, arch: str, num_lanes: int) -> int:
    """The warps (waves) of a block."""
    if target not in _ARCHES:
        raise ValueError(f"target must be one of {', '.join(_ARCHES)}, not {target!r}")
    if not re.fullmatch(_ARCHES[target], arch):
        like = {"cuda": 'like "sm_90"', "hip": 'like "gfx942", of waves of 64 lanes'}[target]
        raise ValueError(f"arch must be {like}, not {arch!r}")
    check_lanes(target, "triton", num_lanes)
    return num_lanes // TEAM_LANES[target]


def _gpu_target(target: str, arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    name = int(arch.removeprefix("sm_")) if target == "cuda" else arch
    return GPUTarget(target, name, TEAM_LANES[target])


def _tools(triton: Any, target: Any) -> list[str]:
    """What else the code depends on: the assembler's release, variables of the environment."""
    from triton._C import libtriton

    backend = triton.compiler.compiler.make_backend(target)
    variables = sorted(libtriton.get_cache_invalidating_env_vars().items())
    return [str(backend.hash()), *(f"{name}={value}" for name, value in variables)]


@contextlib.contextmanager
def _leaving_nothing(triton: Any) -> Iterator[None]:
    """Triton's cache in a folder that is gone afterwards; all that it makes is kept in memory."""
    knobs = triton.knobs
    with (
        tempfile.TemporaryDirectory(prefix="fastkern-triton-") as folder,
        knobs.cache.scope(),
        knobs.compilation.scope(),
    ):
        knobs.cache.dir = folder
        knobs.compilation.always_compile = True
        knobs.compilation.override = False
        knobs.compilation.store_binary_only = False
        yield


def _compile(
    triton: Any,
    entry: str,
    name: str,
    target: Any,
    warps: int,
    constants: Mapping[str, int],
    libraries: Mapping[str, str],
) -> TritonKernel:
    """One kernel. Raises CompileError where it is not such as it must be."""
    from ..kernels.triton import entry as entries

    function = entries.kernel_of(name, between_servers="TRANSPORT" in constants)
    record = DTYPES[entries.record_of(name)]
    fields = record.names or ()
    wanted = [*fields, *constants]
    if list(function.arg_names) != wanted:
        found = ", ".join(function.arg_names)
        raise _wrong(f"{name} has the parameters {found}, not {', '.join(wanted)}")
    signature = {field: _KINDS[record[field].itemsize] for field in fields}
    signature |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=constants)
    made = triton.compile(
        source, target=target, options=options_of(target, warps, entry, libraries)
    )
    text, code = (made.asm[kind] for kind in _BINARIES[target.backend])
    _check_metadata(name, made.metadata, warps)
    if target.backend == "cuda" and (missing := undefined(text)):
        raise _wrong(f"{name} calls what no library here has: {', '.join(missing)}")
    parameters = read_parameters(target.backend, name, text)
    check_parameters(name, record, parameters)
    last, num_bytes = parameters[-1]
    return TritonKernel(
        name=name,
        num_lanes=warps * target.warp_size,
        shared_bytes=int(made.metadata.shared),
        offsets=tuple(offset for offset, _ in parameters),
        record_bytes=record.itemsize,
        parameter_bytes=last + num_bytes,
        code=bytes(code),
    )


def _check_metadata(name: str, metadata: Any, warps: int) -> None:
    """What a launch would have to bring and does not."""
    for what, most in (
        ("global_scratch_size", 0),
        ("profile_scratch_size", 0),
        ("tmem_size", 0),
        ("shared", MOST_SHARED_BYTES),
    ):
        found = getattr(metadata, what, 0)
        if found > most:
            raise _wrong(f"{name}: {what} is {found}, at most {most}")
    for what, wanted in (
        ("num_warps", warps),
        ("num_ctas", 1),
        ("launch_cooperative_grid", False),
        ("launch_pdl", False),
        ("name", name),
    ):
        found = getattr(metadata, what, wanted)
        if found != wanted:
            raise _wrong(f"{name}: {what} is {found}, not {wanted}")


def _wrong(text: str) -> CompileError:
    return CompileError("", "", "", text)
