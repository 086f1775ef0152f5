"""Doubles of the compilers' bindings: as strict as their documentation, and recording.

`hip` follows hip-python: functions return tuples that start with the status; texts and lists of
texts are bytes; a call loads the library and raises RuntimeError where there is none;
hiprtcDestroyProgram takes `program.createRef()`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import ModuleType


class Status(enum.IntEnum):
    HIPRTC_SUCCESS = 0
    HIPRTC_ERROR_INVALID_INPUT = 3
    HIPRTC_ERROR_COMPILATION = 6


@dataclass
class Program:
    source: bytes
    name: bytes
    headers: dict[bytes, bytes]
    options: list[bytes] | None = None
    compiled: bool = False
    destroyed: bool = False

    def createRef(self) -> Reference:  # noqa: N802
        return Reference(self)


@dataclass
class Reference:
    program: Program


@dataclass
class HipRtc:
    """The module hip.hiprtc, and what it was asked for.

    code: what programs compile to; None: the compiler finds an error. failing: calls that return
    an error. library: whether there is one.
    """

    code: bytes | None = b"\x7fELF\0code"
    log: bytes = b"thing.hip:1: error: no such thing\n\0"
    failing: tuple[str, ...] = ()
    library: bool = True
    programs: list[Program] = field(default_factory=list)

    def _call(self, name: str, valid: bool = True) -> Status:
        if not self.library:
            raise RuntimeError("failed to dlopen 'libhiprtc.so'")
        if name in self.failing:
            return Status.HIPRTC_ERROR_INVALID_INPUT
        assert valid, f"{name}: arguments not as documented"
        return Status.HIPRTC_SUCCESS

    def hiprtcVersion(self) -> tuple[Status, int, int]:  # noqa: N802
        return self._call("hiprtcVersion"), 9, 0

    def hipRuntimeGetVersion(self) -> tuple[Status, int]:  # noqa: N802
        return self._call("hipRuntimeGetVersion"), 60342134

    def hiprtcCreateProgram(  # noqa: N802
        self,
        src: bytes,
        name: bytes,
        numHeaders: int,  # noqa: N803
        headers: list[bytes],
        includeNames: list[bytes],  # noqa: N803
    ) -> tuple[Status, Program | None]:
        texts = [src, name, *headers, *includeNames]
        status = self._call(
            "hiprtcCreateProgram",
            all(type(text) is bytes and text and b"\0" not in text for text in texts)
            and type(headers) is type(includeNames) is list
            and numHeaders == len(headers) == len(includeNames),
        )
        if status != Status.HIPRTC_SUCCESS:
            return status, None
        self.programs.append(Program(src, name, dict(zip(includeNames, headers, strict=True))))
        return status, self.programs[-1]

    def hiprtcCompileProgram(  # noqa: N802
        self,
        prog: Program,
        numOptions: int,  # noqa: N803
        options: list[bytes],
    ) -> tuple[Status]:
        self._call(
            "hiprtcCompileProgram",
            not prog.destroyed
            and type(options) is list
            and numOptions == len(options)
            and all(type(option) is bytes for option in options),
        )
        prog.options = options
        prog.compiled = self.code is not None
        return (Status.HIPRTC_SUCCESS if prog.compiled else Status.HIPRTC_ERROR_COMPILATION,)

    def hiprtcGetProgramLogSize(self, prog: Program) -> tuple[Status, int]:  # noqa: N802
        return self._call("hiprtcGetProgramLogSize", not prog.destroyed), len(self.log)

    def hiprtcGetProgramLog(self, prog: Program, log: bytearray) -> tuple[Status]:  # noqa: N802
        status = self._call(
            "hiprtcGetProgramLog",
            not prog.destroyed and type(log) is bytearray and len(log) == len(self.log) > 0,
        )
        log[:] = self.log
        return (status,)

    def hiprtcGetCodeSize(self, prog: Program) -> tuple[Status, int]:  # noqa: N802
        status = self._call("hiprtcGetCodeSize", prog.compiled and not prog.destroyed)
        return status, len(self.code or b"")

    def hiprtcGetCode(self, prog: Program, code: bytearray) -> tuple[Status]:  # noqa: N802
        status = self._call(
            "hiprtcGetCode",
            prog.compiled
            and not prog.destroyed
            and type(code) is bytearray
            and len(code) == len(self.code or b""),
        )
        code[:] = self.code or b""
        return (status,)

    def hiprtcDestroyProgram(self, prog: Reference) -> tuple[Status]:  # noqa: N802
        status = self._call(
            "hiprtcDestroyProgram", type(prog) is Reference and not prog.program.destroyed
        )
        prog.program.destroyed = True
        return (status,)


def hip_module(rtc: HipRtc) -> ModuleType:
    """The package `hip`, with its modules as attributes: newer releases have no others."""
    module = ModuleType("hip")
    module.__dict__.update(hiprtc=rtc, hip=rtc)
    return module
