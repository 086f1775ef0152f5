"""The calls that are tried: named ones, one for each thing that users do, and random ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.moe_cases import CHOICES, MAPS, PAYLOADS, SUMMED, TOKENS, Case

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
_NAMED = (
    Case("plain"),
    Case("top-1", topk=1),
    Case("top-8", topk=8, num_experts=24, choose="distinct"),
    Case("top-32", topk=32, num_experts=40, choose="distinct", num_tokens=5),
    Case("top-32 of 3 experts", topk=32, num_experts=3, num_tokens=5),
    Case("rank layout", layout="rank"),
    Case("rank layout, top-8", layout="rank", topk=8, num_experts=19, choose="distinct"),
    Case("rank layout, duplicates", layout="rank", topk=4, choose="duplicates"),
    Case("float64", payload="float64", summed="float64", weight_dtype=F64),
    Case("float64 by rank", payload="float64", summed="float64", weight_dtype=F64, layout="rank"),
    Case("bfloat16", payload="bfloat16", summed="bfloat16", topk=4, width=7),
    Case("bfloat16, fp32 wire", payload="bfloat16", summed="bfloat16", topk=4, wire_dtype=F32),
    Case("bfloat16, bf16 wire", payload="bfloat16", summed="bfloat16", topk=4, wire_dtype=BF16),
    Case("float16", payload="float16", summed="float16", topk=4, width=3, sum_weights=False),
    Case("float16, fp32 wire", payload="float16", summed="float16", layout="rank", wire_dtype=F32),
    Case("int32", payload="int32", idx_dtype=torch.int32, width=1),
    Case("fp8 with scales", payload="fp8_scales", width=129, summed="bfloat16", sum_width=129),
    Case("fp8, scales, ids", payload="fp8_scales_ids", width=17, layout="rank", topk=5),
    Case("four payloads", payload="mixed", width=13, alignment=4),
    Case("alignment 4", alignment=4, choose="skewed"),
    Case("alignment 128", alignment=128, zero_padding=True),
    Case("alignment 3, zeros", alignment=3, zero_padding=True, payload="fp8_scales_ids"),
    Case("masked", choose="masked", topk=6, idx_dtype=torch.int32),
    Case("masked, rank layout", choose="masked", topk=6, layout="rank"),
    Case("masked, bias per token", choose="masked", topk=3, bias="token"),
    Case("bias", bias="row", summed="bfloat16", layout="rank", sum_weights=False),
    Case("duplicates", choose="duplicates", topk=5),
    Case("duplicates, bfloat16", choose="duplicates", topk=5, summed="bfloat16", alignment=4),
    Case("one expert", choose="one_expert", topk=1, num_tokens=32),
    Case("one expert, top-3", choose="one_expert", topk=3, layout="rank"),
    Case("local only", choose="local", topk=3),
    Case("remote only", choose="remote", topk=3),
    Case("one token", tokens="one_token", topk=6, choose="distinct"),
    Case("no tokens", tokens="none"),
    Case("no tokens, padded", tokens="none", alignment=4, static=True),
    Case("some ranks without tokens", tokens="some_none"),
    Case("tokens on one rank", tokens="one_rank", topk=4, layout="rank"),
    Case("one expert in all", num_experts=1, topk=1),
    Case("fewer experts than ranks", num_experts=3, topk=2, alignment=4),
    Case("30 experts", num_experts=30, topk=8, choose="distinct"),
    Case("reversed map", experts="reversed", topk=3),
    Case("round robin", experts="round_robin", topk=3, layout="rank"),
    Case("random map", experts="random", num_experts=13, topk=4, alignment=4),
    Case("all experts on a rank", experts="one_rank", num_experts=6, topk=6, choose="distinct"),
    Case("static", static=True, topk=3),
    Case("static, tokens on one rank", static=True, tokens="one_rank", alignment=4, topk=3),
    Case("static, rank layout", static=True, layout="rank", topk=4, choose="masked"),
    Case("static, zeros", static=True, zero_padding=True, alignment=128, num_tokens=3),
    Case("no weights", weight_dtype=None, sum_weights=False),
    Case("no weights, rank layout", weight_dtype=None, sum_weights=False, layout="rank"),
    Case("widths of their own", width=1, sum_width=300, summed="bfloat16", num_tokens=20),
    Case("wide", width=1368, sum_width=1, num_tokens=20),
    Case("out", out=True, topk=3),
    Case("out, padded", out=True, alignment=4, topk=3, payload="mixed", summed="bfloat16"),
    Case("out, rank layout", out=True, layout="rank", payload="fp8_scales", summed="float16"),
    Case("out, static", out=True, static=True, layout="rank", bias="token"),
)
NAMED = tuple(replace(case, seed=seed) for seed, case in enumerate(_NAMED))


def random_cases(seed: int, number: int) -> list[Case]:
    """Cases of all kinds mixed; the same for the same seed."""
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    cases = []
    for index in range(number):
        layout, summed = pick("expert", "rank"), pick(*SUMMED)
        cases.append(
            Case(
                f"random {seed}.{index}",
                seed=1000 + 100 * seed + index,
                tokens=pick(*TOKENS[:3], *TOKENS),
                num_tokens=pick(1, 5, 9, 16),
                choose=pick(*CHOICES),
                topk=pick(1, 2, 3, 8, 8, 32),
                num_experts=int(rng.integers(1, 41)),
                experts=pick("default", "default", *MAPS),
                layout=layout,
                alignment=pick(1, 1, 4, 7, 128) if layout == "expert" else 1,
                zero_padding=pick(True, False),
                static=pick(True, False, False),
                payload=pick(*PAYLOADS),
                width=pick(1, 2, 7, 8, 31, 64, 129, 400),
                idx_dtype=pick(torch.int32, torch.int64),
                weight_dtype=pick(None, F32, F32, F64),
                summed=summed,
                sum_width=pick(1, 2, 7, 8, 31, 64, 129, 400),
                sum_weights=pick(True, False),
                bias=pick(None, "row", "token"),
                wire_dtype=pick(None, F32) if summed != "float64" else None,
                out=pick(True, False, False),
            )
        )
    return cases
