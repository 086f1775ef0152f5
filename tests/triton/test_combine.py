"""Combine in Triton, interpreted: the host's results byte for byte, with NaNs and infinities.

tests/test_moe_calls.py and others hold the host's to a reference. Tiles of 128 bytes of sums are
smaller than most rows here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.conftest import SharedPools
from tests.moe_cases import Case
from tests.triton.combine_cases import Combine, same_as_host

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
FLOAT64 = Case("float64", summed="float64", weight_dtype=F64, num_tokens=5)
# Every kind of values, wire and bias, rows by vectors and value by value, both layouts.
COMBINES = (
    Combine(
        Case(
            "bfloat16 by vectors",
            summed="bfloat16",
            sum_width=40,
            wire_dtype=F32,
            choose="masked",
            topk=6,
            alignment=4,
            bias="token",
        ),
        bias_dtype=F32,
    ),
    Combine(
        Case(
            "float16 by rank",
            summed="float16",
            sum_width=7,
            layout="rank",
            choose="duplicates",
            topk=4,
            tokens="some_none",
            bias="row",
        )
    ),
    Combine(
        Case(
            "float32, all experts",
            sum_width=129,
            num_tokens=2,
            topk=8,
            choose="distinct",
            bias="token",
        ),
        bias_dtype=BF16,
    ),
    Combine(
        Case("bfloat16, shifted", summed="bfloat16", sum_width=40, choose="duplicates", bias="row"),
        shifted="rows",
    ),
    Combine(
        Case(
            "float16 by vectors",
            summed="float16",
            sum_width=8,
            choose="masked",
            sum_weights=False,
        )
    ),
    Combine(
        replace(FLOAT64, sum_width=24, choose="duplicates", topk=3, bias="row"), shifted="bias"
    ),
    Combine(
        replace(FLOAT64, name="float64 by rank", sum_width=7, topk=4, layout="rank", bias="token")
    ),
)
MIXED = tuple(
    one._replace(case=replace(one.case, seed=seed)) for seed, one in enumerate(COMBINES, 50)
)


@pytest.mark.parametrize(
    ("servers", "num_ranks", "policy", "which"),
    [
        (2, 4, "whole", slice(0, None, 2)),
        (2, 4, "direct", slice(1, None, 2)),
        (1, 3, "auto", slice(0, None, 2)),
        (3, 3, "split", slice(2, None, 4)),
    ],
    ids=["2x2, whole", "2x2, direct", "1x3", "3x1"],
)
def test_sums_are_those_of_the_host(
    interpreting_pools: SharedPools, servers: int, num_ranks: int, policy: str, which: slice
) -> None:
    options = {"policy": policy, "chunk_bytes": 800, "num_blocks": 2}
    pool, asked = interpreting_pools.pool(num_ranks), MIXED[which]
    done = pool.run(same_as_host, servers, 128, options, asked, timeout_s=120)
    for names, num_nan in done:
        assert names == {"fastkern_combine", "fastkern_combine_float64"}
        assert num_nan > 0
