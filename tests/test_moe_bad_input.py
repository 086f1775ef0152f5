"""Bad input to dispatch and combine, on one rank or between ranks: one error, the same on all.

Nothing is written then, and the communicator works afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastkern import Communicator
from tests.processes import Pool

CANARY = -77.0
RECEIVED = (7, 7, 1, 5)  # rows of `correct` on each rank: experts 0 to 7 get 6, 1, 2, 5, 1, 0, 1, 4
Change = Callable[[dict[str, Any], int], None]


def correct(rank: int) -> dict[str, Any]:
    """A dispatch of 3 tokens, top-2 of 8 experts."""
    return {
        "x": torch.arange(3)[:, None].repeat(1, 4) + 100.0 * rank,
        "topk_idx": torch.tensor([[rank, 7], [-1, 2 * rank], [0, 3]]),
        "topk_weights": torch.ones(3, 2),
        "num_experts": 8,
    }


def works(comm: Communicator) -> tuple[Tensor, Any]:
    """A dispatch and a combine give the right sums; what was received, and the handle."""
    arguments = correct(comm.rank)
    recv, weights, _, handle = comm.dispatch(**arguments)
    assert comm.combine(recv, handle, weights=weights)[:, 3].tolist() == [
        factor * (100.0 * comm.rank + t) for t, factor in enumerate((2, 1, 2))
    ]
    return recv, handle


def alike(errors: list[BaseException], kind: type[BaseException], words: str) -> None:
    """One error, of this very type and with the same text on all ranks, which has the words."""
    assert [type(e) for e in errors] == [kind] * len(errors), errors
    texts = {str(e) for e in errors}
    assert len(texts) == 1, texts
    text = texts.pop()
    for word in words.split(","):
        assert word in text, f"{word!r} is not in: {text}"


# -- dispatch --------------------------------------------------------------------------------------


def set_(**arguments: Any) -> Change:
    """A change that gives these arguments."""
    return lambda given, rank: given.update(arguments)


def cast(name: str, dtype: torch.dtype) -> Change:
    """A change of one argument's dtype."""
    return lambda given, rank: given.update({name: given[name].to(dtype)})


def index(value: int) -> Change:
    """A change of one choice, of token 1."""

    def change(given: dict[str, Any], rank: int) -> None:
        given["topk_idx"] = given["topk_idx"].clone()
        given["topk_idx"][1, 0] = value

    return change


def wide(given: dict[str, Any], rank: int) -> None:
    """Top-33."""
    given.update(topk_idx=torch.zeros(3, 33, dtype=torch.int64), topk_weights=None)


def no_choice(given: dict[str, Any], rank: int) -> None:
    """Top-0."""
    given.update(topk_idx=torch.zeros(3, 0, dtype=torch.int64), topk_weights=None)


def top_1(given: dict[str, Any], rank: int) -> None:
    given.update(topk_idx=given["topk_idx"][:, 1:], topk_weights=torch.ones(3, 1))


# name: (what changes, the error, words of its text)
DISPATCH: dict[str, tuple[Change, type[BaseException], str]] = {
    "float indices": (cast("topk_idx", torch.float32), TypeError, "topk_idx"),
    "int16 indices": (cast("topk_idx", torch.int16), TypeError, "topk_idx"),
    "bool indices": (cast("topk_idx", torch.bool), TypeError, "topk_idx"),
    "index is num_experts": (index(8), ValueError, "topk_idx,8"),
    "index is far above": (index(1 << 40), ValueError, "topk_idx"),
    "index -2": (index(-2), ValueError, "topk_idx,-2"),
    "index in one dimension": (set_(topk_idx=torch.tensor([0, 1, 2])), ValueError, "topk_idx"),
    "fewer indices": (set_(topk_idx=torch.tensor([[0, 1]])), ValueError, "topk_idx"),
    "no indices": (set_(topk_idx=None), TypeError, "topk_idx"),
    "top-33": (wide, ValueError, "33"),
    "top-0": (no_choice, ValueError, "topk_idx"),
    "fewer rows": (set_(x=torch.ones(2, 4)), ValueError, "3"),
    "rows of 4 GiB": (set_(x=[torch.ones(3, 1).half().expand(3, 1 << 31)]), ValueError, "4 GiB"),
    "payloads of two lengths": (set_(x=[torch.ones(3, 4), torch.ones(2)]), ValueError, "x[1]"),
    "a scalar": (set_(x=torch.tensor(1.0)), ValueError, "x"),
    "no payload": (set_(x=[]), ValueError, "x"),
    "a list of numbers": (set_(x=[1.0, 2.0, 3.0]), TypeError, "x"),
    "sparse": (set_(x=torch.ones(3, 4).to_sparse()), TypeError, "x"),
    "weights of another shape": (set_(topk_weights=torch.ones(3, 3)), ValueError, "topk_weights"),
    "bfloat16 weights": (cast("topk_weights", torch.bfloat16), TypeError, "topk_weights"),
    "integer weights": (cast("topk_weights", torch.int64), TypeError, "topk_weights"),
    "no experts": (set_(num_experts=0), ValueError, "num_experts"),
    "half an expert": (set_(num_experts=8.5), TypeError, "num_experts"),
    "num_experts not given": (set_(num_experts=None), TypeError, "num_experts"),
    "a layout of its own": (set_(layout="token"), ValueError, "layout"),
    "no blocks": (set_(num_blocks=0), ValueError, "num_blocks,1 to 1,not 0"),
    "more blocks than there are": (set_(num_blocks=2), ValueError, "num_blocks,1 to 1,not 2"),
    "2^64 blocks": (set_(num_blocks=1 << 64), ValueError, "num_blocks"),
    "half a block": (set_(num_blocks=0.5), TypeError, "num_blocks"),
    "blocks by truth": (set_(num_blocks=True), TypeError, "num_blocks"),
    "alignment 0": (set_(expert_alignment=0), ValueError, "expert_alignment"),
    "alignment 1.5": (set_(expert_alignment=1.5), TypeError, "expert_alignment"),
    "map too short": (set_(expert_to_rank=[0, 1, 2, 3]), ValueError, "expert_to_rank"),
    "map to rank 4": (set_(expert_to_rank=[4] + [0] * 7), ValueError, "expert_to_rank[0]"),
    "map to rank -1": (set_(expert_to_rank=[0] * 7 + [-1]), ValueError, "expert_to_rank[7]"),
    "map of fractions": (set_(expert_to_rank=[0.5] * 8), TypeError, "expert_to_rank"),
    "too many tokens": (set_(num_max_tokens_per_rank=2), ValueError, "num_max_tokens_per_rank"),
    "negative most": (set_(num_max_tokens_per_rank=-1), ValueError, "num_max_tokens_per_rank"),
    "most is no number": (set_(num_max_tokens_per_rank=3.5), TypeError, "num_max_tokens_per_rank"),
}
# What is right by itself but not what the other ranks say.
DIFFERENT: dict[str, tuple[Change, type[BaseException], str]] = {
    "K": (top_1, ValueError, "top 1,top 2"),
    "num_experts": (set_(num_experts=9), ValueError, "8 experts,9 experts"),
    "map": (set_(expert_to_rank=[0, 0, 1, 1, 2, 2, 3, 3]), ValueError, "expert_to_rank"),
    "layout": (set_(layout="rank"), ValueError, "expert,rank"),
    "alignment": (set_(expert_alignment=4), ValueError, "alignment 1,alignment 4"),
    "most": (set_(num_max_tokens_per_rank=5), ValueError, "5"),
    "width": (set_(x=torch.ones(3, 5)), ValueError, "4,5"),
    "shape of a row": (set_(x=torch.ones(3, 2, 2)), ValueError, "[4],[2, 2]"),
    "dtype": (cast("x", torch.int32), TypeError, "float32,int32"),
    "more payloads": (set_(x=[torch.ones(3, 4), torch.ones(3)]), TypeError, "float32,float32"),
    "no weights": (set_(topk_weights=None), ValueError, "weights"),
    "float64 weights": (cast("topk_weights", torch.float64), ValueError, "weights"),
}


def bad_dispatch(rank: int, num_ranks: int, odd_rank: int, name: str) -> None:
    """Rank `odd_rank`, or all for -1, gives the changed arguments; nothing may be written."""
    change = (DISPATCH | DIFFERENT)[name][0]
    with Communicator(servers=2, entry_timeout_s=50) as comm:
        _, kept = works(comm)
        arguments = correct(rank)
        if odd_rank in (-1, rank):
            change(arguments, rank)
        if isinstance(arguments["x"], Tensor):
            x = arguments["x"]
            shape = (RECEIVED[rank], *x.shape[1:])
            arguments["out"] = torch.full(shape, CANARY).to(x.dtype)
        try:
            comm.dispatch(**arguments)
        except (ValueError, TypeError):
            if "out" in arguments:
                assert (arguments["out"] == CANARY).all(), "written in spite of the error"
            recv, _ = works(comm)
            comm.combine(recv, kept)
            raise


@pytest.mark.parametrize("name", DISPATCH)
@pytest.mark.parametrize("odd_rank", [0, 3, -1])
def test_bad_dispatch(four: Pool, name: str, odd_rank: int) -> None:
    _, kind, words = DISPATCH[name]
    alike(four.errors(bad_dispatch, odd_rank, name), kind, words)


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("odd_rank", [0, 2])
def test_ranks_that_disagree(four: Pool, name: str, odd_rank: int) -> None:
    _, kind, words = DIFFERENT[name]
    alike(four.errors(bad_dispatch, odd_rank, name), kind, words)


def bad_out(rank: int, num_ranks: int, odd_rank: int, what: str) -> None:
    """Rank `odd_rank` gives an out that does not fit, the others one that does."""
    num_rows = RECEIVED[rank]
    right = torch.full((num_rows, 4), CANARY)
    wrong: dict[str, Any] = {
        "rows": torch.full((num_rows + 1, 4), CANARY),
        "width": torch.full((num_rows, 5), CANARY),
        "dtype": torch.full((num_rows, 4), CANARY, dtype=torch.float64),
        "list": [right, right.clone()],
        "overlap": torch.full((1, 4), CANARY).expand(num_rows, 4),
    }
    with Communicator(servers=2, entry_timeout_s=50) as comm:
        recv, _ = works(comm)
        assert len(recv) == num_rows, len(recv)
        out = wrong[what] if rank == odd_rank else right
        try:
            comm.dispatch(**correct(rank), out=out)
        except (ValueError, TypeError):
            for tensor in out if isinstance(out, list) else [out]:
                assert (tensor == CANARY).all(), "written in spite of the error"
            works(comm)
            raise


@pytest.mark.parametrize("what", ["rows", "width", "dtype", "list", "overlap"])
def test_an_out_that_does_not_fit(four: Pool, what: str) -> None:
    kind = TypeError if what in ("dtype", "list") else ValueError
    alike(four.errors(bad_out, 1, what), kind, "out")


def overflow(rank: int, num_ranks: int) -> None:
    """Each token names the one expert of rank 0 twice: 16 rows where 4 * 2 * min(2, 1) fit."""
    with Communicator(servers=2, entry_timeout_s=50) as comm:
        works(comm)
        try:
            comm.dispatch(
                torch.ones(2, 4),
                torch.zeros(2, 2, dtype=torch.int64),
                num_experts=4,
                num_max_tokens_per_rank=2,
            )
        except ValueError:
            works(comm)
            raise


def test_a_static_call_that_does_not_fit(four: Pool) -> None:
    alike(four.errors(overflow), ValueError, "16,8,num_max_tokens_per_rank")


# -- combine ---------------------------------------------------------------------------------------


def huge(given: dict[str, Any], rank: int) -> None:
    given.update(expert_out=given["expert_out"][:, :1].expand(-1, 1 << 30), out=None)


COMBINE: dict[str, tuple[Change, type[BaseException], str]] = {
    "more rows": (set_(expert_out=torch.ones(50, 4)), ValueError, "expert_out"),
    "a scalar": (set_(expert_out=torch.tensor(1.0)), ValueError, "expert_out"),
    "rows of 4 GiB": (huge, ValueError, "4 GiB"),
    "integers": (cast("expert_out", torch.int32), TypeError, "expert_out"),
    "fp8": (cast("expert_out", torch.float8_e4m3fn), TypeError, "expert_out"),
    "no tensor": (set_(expert_out=[1.0]), TypeError, "expert_out"),
    "weights of another shape": (set_(weights=torch.ones(50)), ValueError, "weights"),
    "integer weights": (cast("weights", torch.int64), TypeError, "weights"),
    "bias of another width": (set_(bias=torch.ones(5)), ValueError, "bias"),
    "bias of more tokens": (set_(bias=torch.ones(4, 4)), ValueError, "bias"),
    "integer bias": (set_(bias=torch.ones(4, dtype=torch.int64)), TypeError, "bias"),
    "wire of another dtype": (set_(wire_dtype=torch.float16), TypeError, "wire_dtype"),
    "out of more tokens": (set_(out=torch.full((4, 4), CANARY)), ValueError, "out"),
    "out of another width": (set_(out=torch.full((3, 5), CANARY)), ValueError, "out"),
    "out of another dtype": (set_(out=torch.full((3, 4), CANARY).half()), TypeError, "out"),
    "no blocks": (set_(num_blocks=0, out=None), ValueError, "num_blocks,1 to 1,not 0"),
    "no blocks, out": (set_(num_blocks=0), ValueError, "num_blocks,1 to 1,not 0"),
    "more blocks than there are": (set_(num_blocks=2), ValueError, "num_blocks,1 to 1,not 2"),
    "half a block": (set_(num_blocks=0.5, out=None), TypeError, "num_blocks"),
    "no handle": (set_(handle=None), TypeError, "handle"),
    "handle of another kind": (set_(handle=torch.ones(3)), ValueError, "handle"),
}


def wider(given: dict[str, Any], rank: int) -> None:
    given.update(expert_out=torch.cat([given["expert_out"]] * 2, 1), out=None)


def bf16(given: dict[str, Any], rank: int) -> None:
    given.update(expert_out=given["expert_out"].bfloat16(), out=None)


DIFFERENT_SUMS: dict[str, tuple[Change, type[BaseException], str]] = {
    "width": (wider, ValueError, "4,8"),
    "dtype": (bf16, TypeError, "float32,bfloat16"),
}


def bad_combine(rank: int, num_ranks: int, odd_rank: int, name: str) -> None:
    """Rank `odd_rank`, or all for -1, gives the changed arguments; nothing may be written."""
    change = (COMBINE | DIFFERENT_SUMS)[name][0]
    with Communicator(servers=2, entry_timeout_s=50) as comm:
        recv, handle = works(comm)
        arguments: dict[str, Any] = {
            "expert_out": recv,
            "handle": handle,
            "weights": torch.ones(len(recv)),
            "out": torch.full((3, 4), CANARY),
        }
        if odd_rank in (-1, rank):
            change(arguments, rank)
        try:
            comm.combine(**arguments)
        except (ValueError, TypeError):
            out = arguments["out"]
            assert out is None or (out == CANARY).all(), "written in spite of the error"
            works(comm)
            comm.combine(recv, handle)
            raise


@pytest.mark.parametrize("name", COMBINE)
@pytest.mark.parametrize("odd_rank", [0, 3, -1])
def test_bad_combine(four: Pool, name: str, odd_rank: int) -> None:
    _, kind, words = COMBINE[name]
    alike(four.errors(bad_combine, odd_rank, name), kind, words)


@pytest.mark.parametrize("name", DIFFERENT_SUMS)
@pytest.mark.parametrize("odd_rank", [0, 2])
def test_ranks_that_sum_different_things(four: Pool, name: str, odd_rank: int) -> None:
    _, kind, words = DIFFERENT_SUMS[name]
    alike(four.errors(bad_combine, odd_rank, name), kind, words)
