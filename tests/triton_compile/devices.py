"""What PTX, SASS and AMD assembly call what kernels do: patterns, from an instruction's name on.

On NVIDIA orders are judged in PTX, whose memory model names them, widths and spills in SASS.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_WAIT = r"s_waitcnt\b.*\bvmcnt\(0\)"


@dataclass(frozen=True)
class Device:
    look: str  # at a word, at system scope, by one thread: relaxed
    acquire: str  # the same, acquiring
    add: str  # acquiring and releasing
    swap: str
    flag: str  # a store or swap that releases
    # Instructions in this order:
    acquired: tuple[str, ...]  # after an acquire: nothing older is read
    hand_on: tuple[str, ...]  # then, before the barrier: nor by other waves
    drain: tuple[str, ...]  # of each wave, before the block barrier: its stores are visible
    release: tuple[str, ...]  # before what releases
    shared_done: tuple[str, ...]  # what was written to shared memory is there
    barrier: str
    write_shared: str
    read_shared: str
    load: str  # plain, of global memory, of any width
    store: str
    sleep: str
    clock: str
    end: str
    product: str  # 64 bits wide
    # Loads that may see what was there before a peer wrote; a generic address; what is called.
    bad: str


CUDA = Device(
    look=r"(?:ld\.global\.sys\.relaxed\.b64|atom\.global\.sys\.relaxed\.add\.u64) ",
    acquire=r"(?:ld\.global\.sys\.acquire\.b64|atom\.global\.sys\.acquire\.add\.u64) ",
    add=r"atom\.global\.sys\.acq_rel\.add\.u64 ",
    swap=r"atom\.global\.acq_rel\.sys\.cas\.b64 ",
    flag=r"st\.release\.sys\.global\.u64 ",
    acquired=(),
    hand_on=(),
    drain=(),
    release=(),
    shared_done=(),
    barrier=r"bar\.sync 0",
    write_shared=r"st\.shared",
    read_shared=r"ld\.shared",
    load=r"ld\.global\.(?:v\d\.)?b\d+ ",
    store=r"st\.global\.(?:v\d\.)?b\d+ ",
    sleep=r"nanosleep\.u32 ",
    clock=r"mov\.u64 \S+ %globaltimer",
    end=r"ret\b|exit\b",
    product=r"(?:mul|mad)\.lo\.[su]64 ",
    bad=r"ld\.(?:global\.nc|b\d|u\d|s\d|local)|st\.(?:b\d|u\d|local)|call",
)
GFX942 = Device(  # and gfx950
    look=r"global_(?:load_dwordx2|atomic_add_x2) .* sc0 sc1$",
    acquire=r"global_(?:load_dwordx2|atomic_add_x2) .* sc0 sc1$",
    add=r"global_atomic_add_x2 .* sc0 sc1$",
    swap=r"global_atomic_cmpswap_x2 .* sc0 sc1$",
    flag=r"global_atomic_swap_x2 .* sc1$",
    acquired=(_WAIT, r"buffer_inv sc0 sc1"),
    hand_on=(_WAIT,),
    drain=(r"buffer_wbl2 sc0 sc1", _WAIT),
    release=(r"buffer_wbl2 sc0 sc1", _WAIT),
    shared_done=(r"s_waitcnt\b.*\blgkmcnt\(0\)",),
    barrier=r"s_barrier",
    write_shared=r"ds_write",
    read_shared=r"ds_read",
    load=r"(?:global|buffer)_load_(?!.*\bsc\d)",
    store=r"(?:global|buffer)_store_(?!.*\bsc\d)",
    sleep=r"s_sleep ",
    clock=r"s_memrealtime ",
    end=r"s_endpgm",
    product=r"v_mad_u64_u32|[sv]_mul_hi_u32",
    bad=r"flat_|scratch_|s_swappc",
)
# No scope bits: atomics reach fine-grained memory as they are.
GFX90A = replace(
    GFX942,
    look=r"global_(?:load_dwordx2|atomic_add_x2) .* glc$",
    acquire=r"global_(?:load_dwordx2|atomic_add_x2) .* glc$",
    add=r"global_atomic_add_x2 .* glc$",
    swap=r"global_atomic_cmpswap_x2 .* glc$",
    flag=r"global_atomic_swap_x2 ",
    acquired=(_WAIT, r"buffer_invl2", r"buffer_wbinvl1_vol"),
    drain=(r"buffer_wbl2", _WAIT),
    release=(r"buffer_wbl2", _WAIT),
    load=r"(?:global|buffer)_load_(?!.*\bglc)",
    store=r"(?:global|buffer)_store_",
)
# By bytes: loads and stores of SASS and of AMD assembly.
SASS_WIDTHS = {
    16: (r"LDG\.E\.128 ", r"STG\.E\.128 "),
    8: (r"LDG\.E\.64 ", r"STG\.E\.64 "),
    4: (r"LDG\.E ", r"STG\.E "),
    1: (r"LDG\.E\.[US]8 ", r"STG\.E\.U8 "),
}
# Addresses that all threads share may be loaded from by scalar instructions.
_MEMORY = r"(?:global|buffer)_"
AMD_WIDTHS = {
    16: (rf"{_MEMORY}load_dwordx4 ", rf"{_MEMORY}store_dwordx4 "),
    8: (
        rf"{_MEMORY}load_dwordx2 |s_load_dwordx2 ",
        rf"{_MEMORY}store_dwordx2 ",
    ),
    4: (rf"{_MEMORY}load_dword |s_load_dword ", rf"{_MEMORY}store_dword "),
    1: (rf"{_MEMORY}load_[us]byte", rf"{_MEMORY}store_byte"),
}

DEVICES = {
    **dict.fromkeys(("sm_80", "sm_90", "sm_100"), CUDA),
    **dict.fromkeys(("gfx942", "gfx950"), GFX942),
    "gfx90a": GFX90A,
}
