"""What differs between NVIDIA, AMD and the interpreter: the only Triton code that asks which it is.

    target_name()   "cuda", "hip", or "host": the interpreter
    drain()         each warp's or wave's stores are visible; before the block barrier of a signal
    acquired(value) of an acquire, its value; before the block barrier that hands it on
    store_release(address, value)   one thread: release at system scope, after a block barrier
    forget(value)   the same, but compilers do not know: what is computed from it is computed anew
    lanes(COUNT)    0, 1, ..., COUNT - 1, int64, of which compilers do not know either
    now_ns()        a clock; equal on all threads
    pause(rounds)   of a wait that has gone on for so many rounds

The interpreter runs programs as Python: there these are plain functions.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl
from triton.language import core

INTERPRETED: bool = triton.knobs.runtime.interpret

# At least the threads of any block: so no two threads hold the same element, and a reduction goes
# through shared memory.
_MOST_THREADS = tl.constexpr(1024)

if INTERPRETED:

    def target_name() -> str:
        return "host"

    def drain() -> None:
        """One thread runs the whole program."""

    def acquired(value: tl.tensor) -> tl.tensor:
        return value

    def forget(value: tl.tensor) -> tl.tensor:
        return value

    def lanes(COUNT: tl.constexpr) -> tl.tensor:
        return tl.arange(0, COUNT).to(tl.int64)

    def now_ns() -> tl.tensor:
        return tl.full((), time.monotonic_ns(), tl.int64)

    def pause(rounds: tl.tensor) -> None:
        """Ranks outnumber cores, and a look takes milliseconds: sleep, 20 ms at most."""
        time.sleep(min(int(rounds), 10) * 2e-3)

else:

    @core.builtin
    def target_name(_semantic=None):
        return core.constexpr(_semantic.builder.options.backend_name)

    @core.builtin
    def _write_back(_semantic=None):
        scope = "" if _semantic.builder.options.arch == "gfx90a" else " sc0 sc1"
        return core.constexpr(f"buffer_wbl2{scope}\ns_waitcnt vmcnt(0)\nv_mov_b32 $0, 0")

    @triton.jit
    def drain():
        if target_name() == "hip":
            # A wave's barrier waits for no store, and a release only for those of its own wave; nor
            # for its own write-back, where Triton 3.6 sees no store before it.
            tl.inline_asm_elementwise(
                _write_back(),
                "=v,~{memory}",
                [],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )

    @triton.jit
    def acquired(value):
        # Not pure: Triton 3.6 drops an acquire of which nothing is used, or the barrier behind it.
        if target_name() == "cuda":
            return tl.inline_asm_elementwise(
                "mov.u64 $0, $1;",
                "=l,l,~{memory}",
                [value],
                dtype=tl.int64,
                is_pure=False,
                pack=1,
            )
        else:  # caches are invalidated, for the other waves too
            return tl.inline_asm_elementwise(
                "s_waitcnt vmcnt(0)",
                "=v,0,~{memory}",
                [value],
                dtype=tl.int64,
                is_pure=False,
                pack=1,
            )

    @triton.jit
    def forget(value):
        # Compilers compute the address of every field once, before all loops, and keep it.
        if target_name() == "cuda":
            return tl.inline_asm_elementwise(
                "// forget", "=l,0", [value], dtype=tl.int64, is_pure=False, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                "; forget", "=v,0", [value], dtype=tl.int64, is_pure=False, pack=1
            )

    @triton.jit
    def lanes(COUNT: tl.constexpr):
        # Or what is computed from them alone is computed before all loops, and kept.
        return forget(tl.arange(0, COUNT).to(tl.int64))

    @triton.jit
    def now_ns():
        # Threads read the clock at different times, and scalars must be equal on all of them: the
        # latest, by a reduction over one element or more of each.
        lane = tl.arange(0, _MOST_THREADS)
        if target_name() == "cuda":
            ns = tl.inline_asm_elementwise(
                "mov.u64 $0, %globaltimer;",
                "=l,r",
                [lane],
                dtype=tl.int64,
                is_pure=False,
                pack=1,
            )
        else:  # 100 MHz, as on every gfx9 Instinct
            ns = 10 * tl.inline_asm_elementwise(
                "s_memrealtime $0\ns_waitcnt lgkmcnt(0)",
                "=s,v",
                [lane],
                dtype=tl.int64,
                is_pure=False,
                pack=1,
            )
        return tl.max(ns)

    @triton.jit
    def pause(rounds):
        if rounds >= 8:
            if target_name() == "cuda":
                doublings = tl.minimum(rounds // 8 - 1, 5)
                tl.inline_asm_elementwise(
                    "nanosleep.u32 $1;\nmov.u32 $0, 0;",
                    "=r,r",
                    [32 << doublings],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )
            else:
                tl.inline_asm_elementwise(
                    "s_sleep 8\nv_mov_b32 $0, 0",
                    "=v",
                    [],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )


@triton.jit
def store_release(address, value):
    if target_name() == "cuda":
        # A store, as peers behind PCIe know no atomics; Triton has none that releases.
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 lane;
            mov.u32 lane, %tid.x;
            setp.eq.u32 first, lane, 0;
            @first st.release.sys.global.u64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,~{memory}",
            [address, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(address.to(tl.pointer_type(tl.int64)), value, sem="release", scope="sys")
