"""HIP: HIPRTC through hip-python. Needs ROCm's libraries; no GPU, as the architecture is given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ..errors import CompileError, DeviceUnavailableError
from .sources import EntrySource

# What clang is told besides architecture, macros and where to look. Without the last two the code
# generator would compute constants once, before the loop that a kernel is, and keep each in a
# register until it ends: the kernels would need more than 64.
HIP_FLAGS = ("-O3", "-std=c++20", "-mllvm", "-disable-machine-licm")


class HipCompiler:
    """Compiles an entry to a code object."""

    name = "hiprtc"
    flags: tuple[str, ...] = HIP_FLAGS  # HIPRTC adds -nogpuinc by itself
    what = "Code"  # or "Bitcode", as HIPRTC names what can be had of a program

    def check_arch(self, arch: str) -> None:
        """Raises ValueError unless `arch` is like "gfx942" or "gfx942:sramecc+:xnack-"."""
        if not re.fullmatch(r"gfx[0-9a-f]{3,4}(:(sramecc|xnack)[+-])*", arch):
            raise ValueError(f'arch must be written like "gfx942", not {arch!r}')

    def version(self) -> str:
        """HIPRTC's and HIP's: HIPRTC has said 9.0 in releases with different compilers.

        Raises DeviceUnavailableError.
        """
        hip, rtc = bindings()
        major, minor = values(_unavailable, rtc.hiprtcVersion)
        (release,) = values(_unavailable, hip.hipRuntimeGetVersion)
        return f"{major}.{minor}, HIP {release}"

    def compile(self, source: EntrySource, arch: str, defines: dict[str, str]) -> bytes:
        """Raises CompileError, DeviceUnavailableError."""

        def failed(log: str) -> CompileError:
            return CompileError(source.name, source.target, arch, log)

        _, rtc = bindings()
        # Handed over as text: what is compiled is what was read, and no directory is searched.
        headers = {path: text for path, text in source.files.items() if path != source.path}
        (program,) = values(
            failed,
            rtc.hiprtcCreateProgram,
            source.text.encode(),
            source.file_name.encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [path.encode() for path in headers],
        )
        try:
            flags = [f"--offload-arch={arch}", *self.flags]
            flags += [f"-D{name}={value}" for name, value in defines.items()]
            (status,) = rtc.hiprtcCompileProgram(program, len(flags), [f.encode() for f in flags])
            if int(status) != 0:
                (size,) = values(failed, rtc.hiprtcGetProgramLogSize, program)
                log = bytearray(size)
                if size:
                    values(failed, rtc.hiprtcGetProgramLog, program, log)
                raise failed(f"{status!r}\n{log.rstrip(bytes(1)).decode(errors='replace')}")
            (size,) = values(failed, getattr(rtc, f"hiprtcGet{self.what}Size"), program)
            code = bytearray(size)
            values(failed, getattr(rtc, f"hiprtcGet{self.what}"), program, code)
            return bytes(code)
        finally:
            rtc.hiprtcDestroyProgram(program.createRef())  # wants the address of the pointer


def bindings() -> tuple[Any, Any]:
    """The modules hip.hip and hip.hiprtc. Raises DeviceUnavailableError."""
    try:
        from hip import hip, hiprtc
    except ImportError as error:
        raise _unavailable(f"cannot import hip-python ({error})") from error
    return hip, hiprtc


def values(failed: Callable[[str], Exception], call: Any, *arguments: Any) -> tuple[Any, ...]:
    """What a call returns after its status; `failed` makes the error to raise for a bad one."""
    try:
        status, *returned = call(*arguments)
    except RuntimeError as error:  # hip-python loads the library at its first call
        raise _unavailable(str(error)) from error
    if int(status) != 0:
        raise failed(f"{call.__name__}: {status!r}")
    return tuple(returned)


def _unavailable(what: str) -> DeviceUnavailableError:
    return DeviceUnavailableError(
        f"no compiler for HIP kernels: {what}. It needs ROCm with HIPRTC, and bindings of the same "
        "release: `pip install 'fastkern[rocm]'`"
    )
