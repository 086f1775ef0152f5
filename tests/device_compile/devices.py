"""What the assembly of each device calls things: patterns, each from an instruction's name on."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Device:
    load: dict[int, str]  # plain, by bytes
    store: dict[int, str]
    any_load: str  # from global memory, not by scalar instructions
    system_load: str  # of 8 bytes, relaxed, at system scope
    system_store: str
    add: str
    swap: str
    # Instructions in this order:
    acquire: tuple[str, ...]  # after a load, that makes an acquire of it
    release: tuple[str, ...]  # before a store, that makes a release of it
    drain: tuple[str, ...]  # of each wave, before the block barrier: its stores are visible
    hand_on: tuple[str, ...]  # of a lane, before the barrier: what it acquired is there for all
    shared_done: tuple[str, ...]  # likewise what it wrote to shared memory
    barrier: str
    write_shared: str
    read_shared: str
    one_lane: str  # of the block goes on
    sleep: str
    end: str
    generic: str  # accesses that do not say which memory they are of
    # Accesses that may see what was there before a peer wrote; of a lane's own memory: spills,
    # arrays.
    bad: str


CUDA = Device(
    load={16: r"LDG\.E\.128 ", 8: r"LDG\.E\.64 ", 4: r"LDG\.E ", 1: r"LDG\.E\.U8 "},
    store={16: r"STG\.E\.128 ", 8: r"STG\.E\.64 ", 4: r"STG\.E ", 1: r"STG\.E\.U8 "},
    any_load=r"LDG?\.",
    system_load=r"LDG\.E\.64\.STRONG\.SYS ",
    system_store=r"STG\.E\.64\.STRONG\.SYS ",
    add=r"ATOMG\.E\.ADD\.64\.STRONG\.SYS ",
    swap=r"ATOMG\.E\.CAS\.64\.STRONG\.SYS ",
    acquire=(r"CCTL\.IVALL",),
    release=(r"MEMBAR\.(?:ALL|SC)\.SYS",),
    drain=(),
    hand_on=(),
    shared_done=(),
    barrier=r"BAR\.SYNC",
    write_shared=r"STS\b",
    read_shared=r"LDS\b",
    one_lane=r"EXIT|BRA",
    sleep=r"NANOSLEEP",
    end=r"EXIT",
    generic=r"(?:LD|ST)\.E|ATOM\.",
    bad=r"LD\S*\.CONSTANT|LDL|STL",
)

_WAIT = r"s_waitcnt\b.*\bvmcnt\(0\)"
GFX942 = Device(  # and gfx950
    load={
        16: r"global_load_dwordx4 ",
        8: r"global_load_dwordx2 (?!.*\bsc\d)",
        4: r"global_load_dword ",
        1: r"global_load_ubyte ",
    },
    store={
        16: r"global_store_dwordx4 ",
        8: r"global_store_dwordx2 (?!.*\bsc\d)",
        4: r"global_store_dword ",
        1: r"global_store_byte ",
    },
    any_load=r"(?:global|flat)_load",
    system_load=r"global_load_dwordx2 .* sc0 sc1$",
    system_store=r"global_store_dwordx2 .* sc0 sc1$",
    add=r"global_atomic_add_x2 .*\bsc1$",
    swap=r"global_atomic_cmpswap_x2 .*\bsc1$",
    acquire=(_WAIT, r"buffer_inv sc0 sc1"),
    release=(r"buffer_wbl2 sc0 sc1", _WAIT),
    drain=(r"buffer_wbl2 sc0 sc1", _WAIT),
    hand_on=(_WAIT,),
    shared_done=(r"s_waitcnt\b.*\blgkmcnt\(0\)",),
    barrier=r"s_barrier",
    write_shared=r"ds_write",
    read_shared=r"ds_read",
    one_lane=r"s_and_saveexec",
    sleep=r"s_sleep",
    end=r"s_endpgm",
    generic=r"flat_",
    bad=r"scratch_|buffer_(?:load|store)|v_accvgpr",
)
# No scope bits: stores and atomics reach fine-grained memory as they are.
GFX90A = replace(
    GFX942,
    load=GFX942.load | {8: r"global_load_dwordx2 (?!.*\bglc)"},
    store=GFX942.store | {8: r"global_store_dwordx2 "},
    system_load=r"global_load_dwordx2 .* glc$",
    system_store=r"global_store_dwordx2 ",
    add=r"global_atomic_add_x2 ",
    swap=r"global_atomic_cmpswap_x2 ",
    acquire=(_WAIT, r"buffer_invl2", r"buffer_wbinvl1_vol"),
    release=(r"buffer_wbl2", _WAIT),
    drain=(r"buffer_wbl2", _WAIT),
)

DEVICES = {
    **dict.fromkeys(("sm_80", "sm_90", "sm_100"), CUDA),
    **dict.fromkeys(("gfx942", "gfx950"), GFX942),
    "gfx90a": GFX90A,
}
