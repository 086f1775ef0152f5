"""Route in Triton, interpreted: the results of the host target byte for byte, in any units."""

from __future__ import annotations

import numpy as np
import pytest

from fastkern.kernels import _host
from tests.triton import route_cases as cases
from tests.triton.interpreted import CaseFailed, Interpreter
from tests.triton.route_cases import Case

UNITS = (1, 2, 7, 20)
LAYOUTS = ("expert", "rank")
NO_BAD = 2**64 - 1
# The example at the top of kernels/body/route.h: 2 servers x 2 ranks, an expert each.
EXAMPLE = Case(2, 2, 0, np.arange(4), np.array([[0, 2], [3, 2], [-1, 1]]))


def test_parameters_are_the_record(interpreter: Interpreter) -> None:
    """Triton's parameters are RouteArgs as it is: the same fields in the same order."""
    fields, num_bytes = _host.record_schemas()["RouteArgs"]
    offset = 0
    for _, kind, at in fields:  # no gaps: a parameter follows the one before it
        assert (kind, at) in (("u8", offset), ("u4", offset))
        offset += int(kind[1])
    assert offset == num_bytes
    for name, parameters in interpreter.run(cases.parameters).items():
        assert parameters == [field for field, _, _ in fields], name


@pytest.mark.parametrize(
    "numbers",
    [
        {"num_ranks": 1, "servers": 1, "gpus_per_server": 1, "topk": 1},
        {
            "num_ranks": 6,
            "servers": 3,
            "gpus_per_server": 2,
            "topk": 5,
            "num_tokens": 7,
            "pack_rows": 11,
            "window_rows": 13,
            "receive_rows": 17,
            "num_own_experts": 19,
            "num_arrivals": 23,
        },
        {
            "num_ranks": 4096,
            "servers": 512,
            "gpus_per_server": 8,
            "topk": 32,
            "num_tokens": 2**26,
            "pack_rows": 2**30 + 1,
            "window_rows": 2**31 - 1,
            "receive_rows": 2**31 + 5,
            "num_own_experts": 2**31 + 1,
            "num_arrivals": 2**32 - 1,
        },
    ],
)
def test_handle_arrays(interpreter: Interpreter, numbers: dict[str, int]) -> None:
    """All that dispatch and combine will look for too, past 2^32 bytes as well."""
    got, right = interpreter.run(cases.handle_offsets, numbers)
    assert got == right


@pytest.mark.parametrize("idx_dtype", ["int32", "int64"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_units", UNITS)
def test_the_example(interpreter: Interpreter, num_units: int, layout: str, idx_dtype: str) -> None:
    case = EXAMPLE._replace(num_units=num_units, layout=layout, idx_dtype=idx_dtype)
    assert interpreter.run(cases.check, case) == NO_BAD


def drawn(seed: int) -> Case:
    """Any case; tokens fill several tiles, the last of them in part."""
    rng = np.random.default_rng(seed)
    servers, m = (int(n) for n in rng.integers(1, 4, 2))
    num_experts = int(rng.integers(1, 40))
    topk = int(rng.choice([1, 2, 3, 5, 6, 8, 11, 16, 17, 24, 31, 32]))
    num_tokens = int(rng.choice([0, 1, 2, 9, 2 * (32 // topk) + 3]))
    # Few experts in use: duplicates of experts, of ranks and of servers.
    most = int(rng.integers(1, num_experts + 1))
    idx = rng.integers(-1, most, (num_tokens, topk))
    return Case(
        servers,
        m,
        int(rng.integers(servers * m)),
        rng.integers(0, servers * m, num_experts),
        idx,
        int(rng.choice(UNITS)),
        str(rng.choice(["int32", "int64"])),
        str(rng.choice(LAYOUTS)),
        seed,
    )


@pytest.mark.parametrize("block", range(6))
def test_random_cases(interpreter: Interpreter, block: int) -> None:
    interpreter.run(cases.check_all, [drawn(seed) for seed in range(10 * block, 10 * block + 10)])


@pytest.mark.parametrize("topk", range(1, 33))
def test_every_top_k(interpreter: Interpreter, topk: int) -> None:
    """A tile holds 32 // K tokens: neither more nor fewer are read."""
    rng = np.random.default_rng(topk)
    num_tokens = 2 * (32 // topk) + 1
    idx = rng.integers(-1, 7, (num_tokens, topk))
    case = Case(2, 2, 1, np.array([0, 1, 2, 3, 1, 1, 3]), idx, seed=topk)
    assert interpreter.run(cases.check, case) == NO_BAD


@pytest.mark.parametrize("num_units", UNITS)
@pytest.mark.parametrize(
    "idx", [np.zeros((0, 3), np.int64), np.zeros((3, 0), np.int64), np.full((4, 3), -1)]
)
def test_nothing_to_send(interpreter: Interpreter, idx: cases.Indices, num_units: int) -> None:
    """F05, F06: no tokens; tokens without choices or with all masked, whose map is filled in."""
    case = Case(2, 2, 1, np.array([0, 3]), idx, num_units)
    assert interpreter.run(cases.check, case) == NO_BAD


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_f05_a_rank_without_tokens_that_owns_all(interpreter: Interpreter, servers: int) -> None:
    """Six experts on rank 0, which has no tokens; the others send it four each."""
    for rank in range(4):
        idx = np.arange(6)[None].repeat(4 if rank else 0, 0)
        case = Case(servers, 4 // servers, rank, np.zeros(6, np.int64), idx, 2)
        interpreter.run(cases.check, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("servers", [1, 2])
def test_f06_masked_slots(interpreter: Interpreter, servers: int, layout: str) -> None:
    """First, last and all choices of a token masked."""
    idx = np.array([[-1, 0], [3, -1], [-1, -1]])
    case = Case(servers, 2 // servers, 0, np.array([0, 0, 1, 1]), idx, layout=layout)
    assert interpreter.run(cases.check, case) == NO_BAD


@pytest.mark.parametrize(
    ("servers", "owned"),
    [
        (2, [4, 4, 4, 4, 4, 4, 3, 3]),
        (4, [4, 4, 4, 4, 4, 4, 3, 3]),
        (1, [2, 1, 1, 1]),
        (2, [1, 1, 1, 0]),
        (3, [3, 2, 2]),
    ],
)
def test_f07_uneven_owners(interpreter: Interpreter, servers: int, owned: list[int]) -> None:
    """Each rank's tokens go to every expert, the last first."""
    owner = np.repeat(np.arange(len(owned)), owned)
    idx = np.arange(len(owner))[None].repeat(3, 0)[:, ::-1]
    for rank in (0, len(owned) - 1):
        case = Case(servers, len(owned) // servers, rank, owner, idx, 2, layout=LAYOUTS[rank > 0])
        assert interpreter.run(cases.check, case) == NO_BAD


@pytest.mark.parametrize("bad", [-2, 4, 2**31 - 1, -(2**31), 2**32, 2**40 + 1, -(2**63)])
def test_the_first_bad_index_is_named(interpreter: Interpreter, bad: int) -> None:
    """Its position, wherever units begin; it is nowhere in what is filled."""
    idx_dtype = "int32" if -(2**31) <= bad < 2**31 else "int64"
    for position, num_units in ((0, 1), (16, 20), (29, 3)):
        idx = np.arange(30) % 5 - 1
        idx[position:] = bad  # in other units too
        idx[position + 1 :: 3] = 2
        case = EXAMPLE._replace(idx=idx.reshape(10, 3), idx_dtype=idx_dtype, num_units=num_units)
        assert interpreter.run(cases.check, case) == position


def test_many_experts(interpreter: Interpreter) -> None:
    """Keys of several blocks of the scan, the last of which is not full; units of two."""
    rng = np.random.default_rng(0)
    owner = np.sort(rng.integers(0, 6, 5003))
    idx = np.concatenate([rng.integers(0, 5003, (20, 8)), np.full((1, 8), 5002)])
    assert interpreter.run(cases.check, Case(3, 2, 4, owner, idx, 2)) == NO_BAD
    few = Case(3, 2, 4, np.arange(6), rng.integers(0, 6, (40, 2)), 34)
    assert interpreter.run(cases.check, few) == NO_BAD


def test_a_wrong_case_fails(interpreter: Interpreter) -> None:
    """What goes wrong in the interpreter's process is told here."""
    with pytest.raises(CaseFailed, match="not a rank"):
        interpreter.run(cases.check, EXAMPLE._replace(owner=np.arange(4) + 1))
