"""Named dispatches and combines with the kernels in Triton, interpreted, against the reference.

Those in which kernels go other ways: many choices, payloads of several dtypes with scales, odd
widths (F08), masked choices (F06), ranks without tokens (F05), one hot expert (F09). Of few tokens:
the interpreter takes milliseconds for each row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import SharedPools
from tests.moe_case_list import NAMED
from tests.moe_cases import Data
from tests.moe_checks import check_case
from tests.triton.communicators import triton_communicator

KNOWN = {case.name: replace(case, num_tokens=min(case.num_tokens, 4)) for case in NAMED}
CASES = {
    (2, 2): (
        ("whole", ("fp8, scales, ids", "some ranks without tokens", "one expert")),
        ("direct", ("top-32 of 3 experts",)),
    ),
    (1, 3): (("auto", ("four payloads", "bfloat16, fp32 wire")),),
    (3, 1): (("split", ("alignment 3, zeros", "tokens on one rank")),),
}


def cases(rank: int, ranks: int, servers: int, policy: str, names: tuple[str, ...]) -> int:
    """Rows that this rank has sent to other servers, in all."""
    del rank
    options: dict[str, Any] = {"policy": policy, "num_blocks": 1, "chunk_bytes": 3000}
    with triton_communicator(servers, **options) as comm:
        return sum(check_case(comm, Data(KNOWN[name], servers, ranks)) for name in names)


@pytest.mark.parametrize("topology", CASES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_named_cases(interpreting_pools: SharedPools, topology: tuple[int, int]) -> None:
    servers, num_ranks = topology[0], topology[0] * topology[1]
    pool = interpreting_pools.pool(num_ranks)
    for policy, names in CASES[topology]:
        sent = pool.run(cases, servers, policy, names, timeout_s=200)
        routings = [Data(KNOWN[name], servers, num_ranks).routing for name in names]
        assert sum(sent) == sum(routing.num_scale_out_rows for routing in routings)
