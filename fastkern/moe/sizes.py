"""Sizes that are known before any count is."""

from __future__ import annotations


def worst_case_rows(
    num_ranks: int,
    num_max_tokens_per_rank: int,
    topk: int,
    num_own_experts: int,
    expert_alignment: int,
    layout: str,
) -> int:
    """The most rows that a rank can receive, and has with num_max_tokens_per_rank.

    num_own_experts: of the receiving rank. layout: "expert" (each choice a row; of a token's topk
    choices only as many count as the rank has experts) or "rank" (each token once).

    Worked example, layout "expert": 4 ranks of at most 10 tokens, topk 8, 3 own experts:
    4 * 10 * min(8, 3) = 120; with expert_alignment 16, rounded up to it and up to one block more
    for each expert: 128 + 3 * 16 = 176.
    """
    most_tokens = num_ranks * num_max_tokens_per_rank
    if layout == "rank":
        return most_tokens if num_own_experts else 0
    rows = most_tokens * min(topk, num_own_experts)
    if expert_alignment == 1:
        return rows
    blocks = -(-rows // expert_alignment)
    return (blocks + num_own_experts) * expert_alignment
