"""PyTorch's contract of all_to_all_single: dtypes, shapes, layouts, policies, aliases, autograd.

Four ranks as processes. Results are compared, byte by byte, with the definition.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import fastkern
from tests.processes import Pool

CANARY = -77
UNEVEN = [[1, 2, 0, 3], [2, 0, 1, 1], [0, 3, 2, 1], [4, 1, 1, 0]]
SILENT = [[0, 0, 0, 0], [2, 1, 0, 3], [0, 0, 0, 0], [1, 5, 0, 2]]  # nothing from 0, 2 or to 2
POLICIES = ("auto", "whole", "split", "direct", "spreadout")


def can_be_made(dtype: torch.dtype) -> bool:
    """Whether it is a dtype of dense tensors."""
    try:
        return not torch.empty(1, dtype=dtype).is_quantized
    except (RuntimeError, TypeError):
        return False


def can_be_copied(dtype: torch.dtype) -> bool:
    """Whether PyTorch can make a strided tensor of it contiguous."""
    try:
        torch.empty(2, 2, dtype=dtype).t().contiguous()
    except NotImplementedError:
        return False
    return True


ALL = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # experimental and deprecated dtypes are among them
    DTYPES = {str(d).removeprefix("torch."): d for d in sorted(ALL, key=str) if can_be_made(d)}


def rows_of(src: int, num_rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[num_rows, *shape], contiguous, of random bytes (bool: 0 and 1), the same on every rank."""
    generator = torch.Generator().manual_seed(src)
    count = torch.Size([num_rows, *shape]).numel() * dtype.itemsize
    top = 2 if dtype == torch.bool else 256
    flat = torch.randint(top, (count,), generator=generator, dtype=torch.uint8)
    return flat.view(dtype).view(num_rows, *shape)


def rows_for(
    dst: int, traffic: list[list[int]], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The definition: each source's part for this rank, in order of source."""
    parts = []
    for src, sent in enumerate(traffic):
        begin = sum(sent[:dst])
        parts.append(rows_of(src, sum(sent), shape, dtype)[begin : begin + sent[dst]])
    return torch.cat([bits(part) for part in parts])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements' bytes in order, [elements * element_size] uint8."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def check(
    rank: int,
    traffic: list[list[int]],
    shape: tuple[int, ...] = (3,),
    dtype: torch.dtype = torch.int64,
    call: Callable[..., object] = fastkern.all_to_all_single,
) -> None:
    """One call between contiguous tensors."""
    received = [sent[rank] for sent in traffic]
    out = torch.zeros(sum(received) * torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
    out = out.view(dtype).view(sum(received), *shape)
    source = rows_of(rank, sum(traffic[rank]), shape, dtype)
    assert call(out, source, received, traffic[rank]) is None
    assert torch.equal(bits(out), rows_for(rank, traffic, shape, dtype)), f"{dtype} {shape}"


# -- dtypes and shapes -----------------------------------------------------------------------------


def one_dtype(rank: int, num_ranks: int, name: str) -> None:
    fastkern.init(servers=2, policy="whole")
    for shape in ((), (3,), (2, 5)):
        check(rank, UNEVEN, shape, DTYPES[name])


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_arrives_bit_by_bit(four: Pool, name: str) -> None:
    four.run(one_dtype, name)


def test_the_dtypes_are_those_that_users_have() -> None:
    common = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 bfloat16 float16 float32"
    rare = "float64 complex64 complex128 float8_e4m3fn float8_e5m2"
    assert set((common + " " + rare).split()) <= set(DTYPES)


def one_shape(rank: int, num_ranks: int, shape: tuple[int, ...], servers: int) -> None:
    fastkern.init(servers=servers, policy="whole")
    for traffic in (UNEVEN, SILENT, [[0] * 4] * 4, [[7] * 4] * 4):
        check(rank, traffic, shape, torch.float32)


@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (0,), (3, 0, 2), (1, 1, 1, 1, 7)])
def test_trailing_shapes_with_rows_of_no_width_among_them(
    four: Pool, shape: tuple[int, ...], servers: int
) -> None:
    four.run(one_shape, shape, servers)


def one_policy(rank: int, num_ranks: int, policy: str, servers: int) -> str:
    comm = fastkern.init(servers=servers, policy=policy, debug=True, chunk_bytes=64)
    assert fastkern.communicator_of() is comm
    for traffic in (UNEVEN, SILENT, [[0, 0, 0, 40]] * 4, [[9] * 4] * 4):
        check(rank, traffic)
    assert comm.stats.plan is not None
    return comm.stats.plan.policy


@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(four: Pool, policy: str, servers: int) -> None:
    used = set(four.run(one_policy, policy, servers))
    assert len(used) == 1
    assert policy == "auto" or used == {policy}


def default_splits(rank: int, num_ranks: int) -> None:
    source = torch.arange(8) + 100 * rank
    expected = [100 * src + 2 * rank + k for src in range(4) for k in range(2)]
    for splits in (None, [], (), [2] * 4, (2,) * 4, torch.tensor([2] * 4), torch.Size([2] * 4)):
        out = torch.full((8,), CANARY)
        fastkern.all_to_all_single(out, source, splits, splits)  # type: ignore[arg-type]
        assert out.tolist() == expected, splits


def test_splits_by_default_and_in_other_sequences(four: Pool) -> None:
    four.run(default_splits)


def same_as_gloo(rank: int, num_ranks: int) -> None:
    received = [sent[rank] for sent in UNEVEN]
    source = rows_of(rank, sum(UNEVEN[rank]), (3,), torch.int64)
    outs = [torch.zeros(sum(received), 3, dtype=torch.int64) for _ in range(2)]
    dist.all_to_all_single(outs[0], source, received, UNEVEN[rank])
    fastkern.all_to_all_single(outs[1], source, received, UNEVEN[rank])
    assert torch.equal(*outs)


def test_takes_what_pytorch_takes_and_gives_what_gloo_gives(four: Pool) -> None:
    four.run(same_as_gloo)
    assert fastkern.all_to_all_FAST is fastkern.all_to_all_single


def bare_empty(rank: int, num_ranks: int) -> None:
    """Ranks that send or receive nothing pass torch.empty(0), without the others' row shape."""
    received = [sent[rank] for sent in SILENT]
    source = rows_of(rank, sum(SILENT[rank]), (3,), torch.float32)
    out = torch.zeros(sum(received), 3)
    if not sum(SILENT[rank]):
        source = torch.empty(0)
    if not sum(received):
        out = torch.empty(0)
    fastkern.init(entry_timeout_s=10)
    fastkern.all_to_all_single(out, source, received, SILENT[rank])
    assert torch.equal(bits(out), rows_for(rank, SILENT, (3,), torch.float32))


def test_a_tensor_without_rows_need_not_have_the_others_row_shape(four: Pool) -> None:
    four.run(bare_empty)


# -- layouts ---------------------------------------------------------------------------------------

Layout = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def every_other_row(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.full((2 * num_rows + 1, 4, 3), CANARY)
    return base, base[1::2]


def every_other_column(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.full((num_rows, 4, 7), CANARY)
    return base, base[:, :, 1::2]


def rows_innermost(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.full((3, 4, num_rows), CANARY)
    return base, base.permute(2, 1, 0)


def middle_of_a_buffer(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.full((12 * num_rows + 2,), CANARY)
    return base, base[1:-1].view(num_rows, 4, 3)


LAYOUTS: dict[str, Layout] = {
    f.__name__: f for f in (every_other_row, every_other_column, rows_innermost, middle_of_a_buffer)
}


def strided(rank: int, num_ranks: int, source_layout: str, target_layout: str) -> None:
    received = [sent[rank] for sent in UNEVEN]
    fastkern.init(servers=2, policy="whole")
    base_in, source = LAYOUTS[source_layout](sum(UNEVEN[rank]))
    base_out, out = LAYOUTS[target_layout](sum(received))
    values = rows_of(rank, sum(UNEVEN[rank]), (4, 3), torch.int64)
    source.copy_(values)
    kept, version = base_in.clone(), out._version
    fastkern.all_to_all_single(out, source, received, UNEVEN[rank])
    assert torch.equal(bits(out), rows_for(rank, UNEVEN, (4, 3), torch.int64))
    assert out._version > version, "autograd would miss that the output was written"
    out.fill_(CANARY)
    assert (base_out == CANARY).all(), "elements between the output's were overwritten"
    assert torch.equal(base_in, kept), "the input was written"


@pytest.mark.parametrize("source_layout", LAYOUTS)
@pytest.mark.parametrize("target_layout", LAYOUTS)
def test_strided_inputs_and_outputs(four: Pool, source_layout: str, target_layout: str) -> None:
    four.run(strided, source_layout, target_layout)


def strided_dtype(rank: int, num_ranks: int, name: str) -> None:
    """Rows and columns exchanged on both sides."""
    dtype, received = DTYPES[name], [sent[rank] for sent in UNEVEN]
    source = rows_of(rank, sum(UNEVEN[rank]), (3,), dtype)
    source = source.t().contiguous().t()
    out = torch.empty(3, sum(received), dtype=dtype).t()
    assert not source.is_contiguous()
    assert not out.is_contiguous()
    fastkern.all_to_all_single(out, source, received, UNEVEN[rank])
    assert torch.equal(bits(out), rows_for(rank, UNEVEN, (3,), dtype))


@pytest.mark.parametrize("name", [name for name, d in DTYPES.items() if can_be_copied(d)])
def test_strided_tensors_of_every_dtype_that_pytorch_copies(four: Pool, name: str) -> None:
    four.run(strided_dtype, name)


def lazy_views(rank: int, num_ranks: int) -> None:
    """Conjugate and negative views, whose memory is not what they mean."""

    def plain(r: int) -> torch.Tensor:
        return torch.arange(4) * (1 + 2j) + 10j * r

    base = torch.zeros(4, dtype=torch.complex64)
    expected = torch.stack([plain(src)[rank] for src in range(4)]).to(torch.complex64)
    fastkern.all_to_all_single(base.conj(), plain(rank).to(torch.complex64).conj())
    assert torch.equal(base, expected)  # conjugate in, conjugate out
    fastkern.all_to_all_single(base.conj().imag, plain(rank).to(torch.complex64).conj().imag)
    assert torch.equal(base.imag, expected.imag)
    out = torch.zeros(4)
    fastkern.all_to_all_single(out, plain(rank).to(torch.complex64).conj().imag)
    assert torch.equal(out, -expected.imag)


def test_conjugate_and_negative_views(four: Pool) -> None:
    four.run(lazy_views)


def expanded_input(rank: int, num_ranks: int) -> None:
    out = torch.zeros(4, 3, dtype=torch.int64)
    fastkern.all_to_all_single(out, torch.tensor([rank]).expand(4, 3))
    assert out.tolist() == [[src] * 3 for src in range(4)]


def test_an_expanded_input_is_read(four: Pool) -> None:
    four.run(expanded_input)


def aliased(rank: int, num_ranks: int, way: str, policy: str) -> None:
    fastkern.init(servers=2, policy=policy)
    base = torch.full((6, 4), CANARY)
    views = {
        "same": (base[:4], base[:4]),
        "shifted": (base[1:5], base[:4]),
        "transposed": (base[:4].t(), base[:4]),
        "both_transposed": (base[:4].t(), base[:4].t()),
    }
    out, source = views[way]
    values = torch.arange(16).view(4, 4)
    source.copy_(values + 100 * rank)
    fastkern.all_to_all_single(out, source)
    assert out.tolist() == [(values[rank] + 100 * src).tolist() for src in range(4)]


@pytest.mark.parametrize("policy", ["whole", "direct"])
@pytest.mark.parametrize("way", ["same", "shifted", "transposed", "both_transposed"])
def test_an_output_that_shares_memory_with_the_input(four: Pool, way: str, policy: str) -> None:
    four.run(aliased, way, policy)


# -- autograd --------------------------------------------------------------------------------------


def with_autograd(rank: int, num_ranks: int) -> None:
    expected = [[float(src)] * 3 for src in range(4)]
    leaf = torch.full((4, 3), float(rank), requires_grad=True)
    for source in (leaf, leaf * 1, torch.nn.Parameter(leaf.detach().clone())):
        for out in (torch.zeros(4, 3), torch.zeros(3, 4).t()):
            fastkern.all_to_all_single(out, source)
            assert out.tolist() == expected
            assert not out.requires_grad
    for out in (torch.zeros(4, 3, requires_grad=True), torch.zeros(3, 4, requires_grad=True).t()):
        fastkern.all_to_all_single(out, leaf)
        assert out.tolist() == expected
    assert leaf.grad is None
    saved = torch.zeros(4, 3)
    product = (leaf * saved).sum()  # backward needs `saved` as it was
    fastkern.all_to_all_single(saved, leaf)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()  # type: ignore[no-untyped-call]


def test_tensors_that_require_gradients(four: Pool) -> None:
    four.run(with_autograd)


def in_inference_mode(rank: int, num_ranks: int) -> None:
    with torch.inference_mode():
        for out in (torch.zeros(4), torch.zeros(8)[::2]):
            fastkern.all_to_all_single(out, torch.full((4,), float(rank)))
            assert out.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_in_inference_mode(four: Pool) -> None:
    four.run(in_inference_mode)
