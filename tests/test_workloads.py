"""Each skew workload has the skew that its name says, and none of another kind."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastkern.moe.placement import Placement
from perf.moe_cases import named_cases, recorded_cases
from perf.moe_report import COPIES, ONCE, predict, row_bytes
from perf.recorded import Recorded, read_recorded, write_recorded
from perf.routed_rows import (
    distinct_servers,
    expected_distinct_servers,
    expert_loads,
    gini,
    routed_rows,
)
from perf.workloads import BURST_FACTOR, BURST_PERIOD, HEAT, WORKLOADS, Ints, Routing, Shape

SERVERS, RANKS = 4, 8
SHAPE = Shape(num_ranks=RANKS, num_tokens=200, num_experts=64, top_k=4, seed=3)


def make(name: str, shape: Shape = SHAPE) -> Routing:
    return WORKLOADS[name](shape)


def rank_loads(routing: Routing, shape: Shape = SHAPE) -> Ints:
    """[R] choices of each rank's experts."""
    loads = expert_loads(routing, shape.num_experts)
    owned = np.bincount(shape.placement.owner, loads, minlength=shape.num_ranks)
    return owned.astype(np.int64)


def shares(loads: Ints) -> np.ndarray:
    return loads / loads.sum()


# -- all -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(("experts", "top_k"), [(64, 1), (64, 8), (30, 3), (32, 4)])
def test_well_formed_and_repeatable(name: str, experts: int, top_k: int) -> None:
    shape = replace(SHAPE, num_experts=experts, top_k=top_k)
    routing = make(name, shape)
    assert len(routing) == RANKS
    for ids in routing:
        assert ids.dtype == np.int64
        assert ids.ndim == 2
        assert ids.shape[1] == top_k
        assert ((ids >= 0) & (ids < experts)).all()
        in_order = np.sort(ids, axis=1)
        assert (in_order[:, 1:] != in_order[:, :-1]).all(), "a token has an expert twice"
    assert all(map(np.array_equal, routing, make(name, shape)))
    other = make(name, replace(shape, seed=4))
    assert not all(map(np.array_equal, routing, other)), "the seed changes nothing"


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(("ranks", "experts"), [(1, 8), (2, 8), (5, 23)])
def test_few_ranks_and_no_tokens(name: str, ranks: int, experts: int) -> None:
    shape = Shape(ranks, 7, experts, 2)
    assert [ids.shape[1] for ids in make(name, shape)] == [2] * ranks
    assert [ids.shape for ids in make(name, replace(shape, num_tokens=0))] == [(0, 2)] * ranks


def test_sizes_that_make_no_workload() -> None:
    with pytest.raises(ValueError, match="no 9 distinct experts among 8"):
        Shape(4, 10, 8, 9)
    with pytest.raises(ValueError, match="leaves 4 experts, too few for top-8"):
        make("zero load", Shape(4, 10, 16, 8))


@pytest.mark.parametrize("name", ["balanced", "uniform", "zipf 0.8", "hot experts", "hot rank"])
def test_all_but_ragged_give_every_rank_the_same_tokens(name: str) -> None:
    assert [len(ids) for ids in make(name)] == [SHAPE.num_tokens] * RANKS


# -- each by its cause -----------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 3, 4, 8, 64])
def test_balanced(top_k: int) -> None:
    routing = make("balanced", replace(SHAPE, top_k=top_k))
    loads = expert_loads(routing, 64)
    assert loads.sum() == RANKS * SHAPE.num_tokens * top_k
    assert loads.max() - loads.min() <= 1
    for ids in routing:  # and from every source
        own = expert_loads([ids], 64)
        assert own.max() - own.min() <= 2


def test_uniform_has_only_sampling_noise() -> None:
    loads = expert_loads(make("uniform"), 64)
    mean = RANKS * SHAPE.num_tokens * 4 / 64
    assert np.abs(loads - mean).max() < 5 * np.sqrt(mean)
    assert 0 < gini(loads) < 0.1


def test_hot_experts_take_their_share_wherever_they_live() -> None:
    loads = expert_loads(make("hot experts"), 64)
    hot = np.argsort(-loads)[:4]
    assert shares(loads)[hot].sum() == pytest.approx(HEAT, abs=1e-9)
    assert loads[hot].min() > 5 * np.delete(loads, hot).max()
    places = {
        tuple(
            sorted(np.argsort(-expert_loads(make("hot experts", replace(SHAPE, seed=s)), 64))[:4])
        )
        for s in range(8)
    }
    assert len(places) == 8


def test_one_hot_rank() -> None:
    share = shares(rank_loads(make("hot rank")))
    assert share[3] == pytest.approx(HEAT, abs=1e-9)
    others = np.delete(share, 3)
    assert others == pytest.approx(np.full(7, (1 - HEAT) / 7), rel=0.15)
    per_source = [shares(rank_loads([ids]))[3] for ids in make("hot rank")]
    assert per_source == pytest.approx([HEAT] * RANKS, abs=1e-9)


def test_a_hot_rank_with_fewer_experts_than_the_share_needs() -> None:
    """Two of eight choices are all that a rank of two experts can get."""
    shape = replace(SHAPE, num_experts=16, top_k=8)
    assert shares(rank_loads(make("hot rank", shape), shape))[3] == 2 / 8


def test_spread_heat_differs_from_the_hot_rank_only_in_place() -> None:
    hot, spread = make("hot rank"), make("spread heat")
    assert np.array_equal(
        np.sort(expert_loads(hot, 64)), np.sort(expert_loads(spread, 64))
    )  # as hot, as many
    assert gini(rank_loads(hot)) > 0.3
    assert gini(rank_loads(spread)) < 0.05
    hottest = np.argsort(-expert_loads(spread, 64))[:8]
    assert sorted(SHAPE.placement.owner[hottest]) == list(range(RANKS))


@pytest.mark.parametrize(("experts", "ranks"), [(30, 8), (64, 4), (9, 2)])
def test_spread_heat_with_more_hot_experts_than_ranks(experts: int, ranks: int) -> None:
    shape = Shape(ranks, 300, experts, 2, seed=ranks - 1)
    hot, spread = make("hot rank", shape), make("spread heat", shape)
    assert np.array_equal(
        np.sort(expert_loads(hot, experts)), np.sort(expert_loads(spread, experts))
    )
    num_hot = len(shape.placement.experts_of(ranks - 1))
    hottest = np.argsort(-expert_loads(spread, experts))[:num_hot]
    on_rank = np.bincount(shape.placement.owner[hottest], minlength=ranks)
    assert on_rank.max() - on_rank.min() <= 1


def test_the_rotating_hotspot_moves_by_one_rank_a_step() -> None:
    hottest = []
    for step in range(2 * RANKS):
        share = shares(rank_loads(make("rotating hotspot", replace(SHAPE, step=step))))
        assert share.max() == pytest.approx(HEAT, abs=1e-9)
        hottest.append(int(share.argmax()))
    assert hottest == [(3 + step) % RANKS for step in range(2 * RANKS)]
    still = [shares(rank_loads(make("hot rank", replace(SHAPE, step=s)))).argmax() for s in (0, 5)]
    assert still == [3, 3]


def test_ragged_sources_differ_in_tokens_and_in_nothing_else() -> None:
    routing = make("ragged sources")
    counts = [len(ids) for ids in routing]
    assert len(set(counts)) == RANKS
    assert sum(counts) == RANKS * SHAPE.num_tokens
    assert max(counts) == pytest.approx(RANKS * min(counts), rel=0.05)
    assert gini(expert_loads(routing, 64)) < 0.1
    later = [len(ids) for ids in make("ragged sources", replace(SHAPE, step=1))]
    assert later == counts


def test_zero_load_is_exactly_zero() -> None:
    routing = make("zero load")
    assert [len(ids) for ids in routing] == [200, 0] * 4
    loads = rank_loads(routing)
    assert (loads[1::2] == 0).all()
    assert loads[::2] == pytest.approx(np.full(4, loads.sum() / 4), rel=0.1)
    experts = expert_loads(routing, 64)
    assert np.count_nonzero(experts) == 16  # every second of the even ranks'
    assert (experts[SHAPE.placement.local_index % 2 == 1] == 0).all()
    rows = routed_rows(routing, SHAPE.placement.owner, SERVERS)
    assert not rows.copies[1::2].any()
    assert not rows.copies[:, 1::2].any()


def test_a_burst_is_one_step_of_more_tokens() -> None:
    sizes = [
        {len(ids) for ids in make("burst", replace(SHAPE, step=step))}
        for step in range(2 * BURST_PERIOD)
    ]
    quiet, loud = {SHAPE.num_tokens}, {SHAPE.num_tokens * BURST_FACTOR}
    assert sizes == ([quiet] * (BURST_PERIOD - 1) + [loud]) * 2
    assert gini(expert_loads(make("burst"), 64)) < 0.1


@pytest.mark.parametrize(("name", "factor"), [("zipf 0.4", 0.4), ("zipf 0.8", 0.8)])
def test_zipf_loads_follow_the_factor(name: str, factor: float) -> None:
    loads = expert_loads(make(name, replace(SHAPE, num_tokens=4000, top_k=1)), 64)
    slope = np.polyfit(np.log(np.arange(1, 65)), np.log(np.sort(loads)[::-1]), 1)[0]
    assert slope == pytest.approx(-factor, abs=0.03)
    again = expert_loads(make(name, replace(SHAPE, num_tokens=4000, top_k=1, step=1)), 64)
    assert loads.argmax() == again.argmax(), "the popular experts last"


# -- rows ------------------------------------------------------------------------------------------


def test_rows_of_a_small_call() -> None:
    """2 servers x 2 ranks, an expert on each rank; -1 and a duplicate among the choices."""
    owner = Placement(4, 4).owner
    routing = [
        np.array([[2, 3, -1], [0, 1, 2], [3, 3, 0]]),
        np.array([[-1, -1, -1]]),
        np.empty((0, 3), dtype=np.int64),
        np.array([[2, 3, 2]]),
    ]
    rows = routed_rows(routing, owner, servers=2)
    assert rows.copies.tolist() == [[2, 1, 2, 3], [0] * 4, [0] * 4, [0, 0, 2, 1]]
    assert rows.to_rank.tolist() == [[2, 1, 2, 2], [0] * 4, [0] * 4, [0, 0, 1, 1]]
    assert rows.to_server.tolist() == [[2, 3], [0, 0], [0, 0], [0, 1]]
    assert rows.between_servers(False).tolist() == [[0, 5], [0, 0]]
    assert rows.between_servers(True).tolist() == [[0, 3], [0, 0]]
    assert (rows.scale_out_rows(False), rows.scale_out_rows(True)) == (5, 3)
    # Two NICs share three rows of 1000 bytes at 0.5 GB/s each.
    assert rows.bound_us(True, 1000, 0.5) == pytest.approx(1.5 * 1000 / 500)
    assert distinct_servers(routing, owner, 2).tolist() == [1, 2, 2, 0, 1]
    assert distinct_servers(routing, owner, 2, remote=True).tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("experts", "top_k", "about"),
    [(256, 8, 3.614), (64, 8, 3.663), (64, 4, 2.775), (64, 2, 1.76), (64, 1, 1.0), (8, 8, 4.0)],
)
def test_distinct_servers_of_uniform_choices(experts: int, top_k: int, about: float) -> None:
    """Four servers, top-8: about 3.6 of 8."""
    shape = Shape(RANKS, 2500, experts, top_k)
    owner = shape.placement.owner
    expected = expected_distinct_servers(owner, RANKS, SERVERS, top_k)
    assert expected == pytest.approx(about, abs=0.005)
    assert distinct_servers(make("uniform", shape), owner, SERVERS).mean() == pytest.approx(
        expected, abs=0.02
    )


def test_distinct_servers_where_owners_are_uneven() -> None:
    shape = Shape(6, 5000, 7, 3)
    owner = Placement(7, 6, [0, 0, 0, 0, 2, 4, 5]).owner
    expected = expected_distinct_servers(owner, 6, 3, 3)
    sampled = distinct_servers(make("uniform", shape), owner, 3)
    assert sampled.mean() == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("name", WORKLOADS)
def test_deduplication_never_adds_rows(name: str) -> None:
    shape = replace(SHAPE, top_k=8)
    routing = make(name, shape)
    rows = routed_rows(routing, shape.placement.owner, SERVERS)
    assert (rows.between_servers(True) <= rows.between_servers(False)).all()
    assert rows.scale_out_rows(True) < 0.7 * rows.scale_out_rows(False)
    remote = distinct_servers(routing, shape.placement.owner, SERVERS, remote=True)
    assert rows.scale_out_rows(True) == remote.sum()


@pytest.mark.parametrize(
    ("loads", "value"), [([5, 5, 5, 5], 0.0), ([0, 0, 0, 8], 0.75), ([1, 3], 0.25), ([0, 0], 0.0)]
)
def test_gini(loads: list[int], value: float) -> None:
    assert gini(np.array(loads)) == pytest.approx(value, abs=1e-12)


# -- the file of recorded routing ------------------------------------------------------------------


def some_recorded() -> Recorded:
    ids = np.random.default_rng(0).integers(-1, 16, (3, 2, 4, 10, 2)).astype(np.int32)
    return Recorded(ids, 16, "Python's own sources")


def test_recorded_file_round_trip(tmp_path: Path) -> None:
    wrote = some_recorded()
    write_recorded(tmp_path / "routing.npz", wrote)
    read = read_recorded(tmp_path / "routing.npz")
    assert np.array_equal(read.topk_idx, wrote.topk_idx)
    assert read.topk_idx.dtype == np.int32
    assert (read.num_experts, read.source) == (16, "Python's own sources")
    assert (read.num_steps, read.num_layers, read.top_k) == (3, 2, 2)


def test_recorded_calls() -> None:
    recorded = some_recorded()
    call = recorded.call(step=2, layer=1)
    assert [ids.dtype for ids in call] == [np.int64] * 4
    assert np.array_equal(np.stack(call), recorded.topk_idx[2, 1])
    # The same tokens over other ranks, in order; and fewer of them, with fewer choices.
    over = recorded.call(2, 1, num_ranks=3)
    assert [len(ids) for ids in over] == [14, 13, 13]
    assert np.array_equal(np.concatenate(over), np.concatenate(call))
    few = recorded.call(2, 1, num_tokens=6, top_k=1)
    assert np.array_equal(np.stack(few), recorded.topk_idx[2, 1, :, :6, :1])
    with pytest.raises(ValueError, match="top-2 was recorded, not top-3"):
        recorded.call(0, 0, top_k=3)


def test_files_that_hold_no_recorded_routing(tmp_path: Path) -> None:
    path = tmp_path / "routing.npz"
    good = some_recorded()
    for change, message in (
        ({"topk_idx": good.topk_idx[0]}, "topk_idx must be integers"),
        ({"topk_idx": good.topk_idx.astype(np.float32)}, "topk_idx must be integers"),
        ({"num_experts": 15}, "topk_idx holds -1 to 15, with 15 experts"),
    ):
        write_recorded(path, replace(good, **change))
        with pytest.raises(ValueError, match=message):
            read_recorded(path)
    np.savez(path.open("wb"), topk_idx=good.topk_idx)
    with pytest.raises(ValueError, match="no num_experts, source"):
        read_recorded(path)
    with pytest.raises(OSError, match="nowhere"):
        read_recorded(tmp_path / "nowhere.npz")


# -- cases to measure ------------------------------------------------------------------------------


def test_named_cases_have_a_routing_for_each_repeat() -> None:
    cases = named_cases(replace(SHAPE, top_k=8), WORKLOADS, [2, 8], repeats=3, every=False)
    assert {c.name for c in cases} == set(WORKLOADS)
    assert sorted(c.top_k for c in cases if c.name == "uniform") == [2, 8]
    assert [c.top_k for c in cases if c.name == "hot rank"] == [8]
    for case in cases:
        assert len(case.routings) == 3
        assert {ids.shape[1] for call in case.routings for ids in call} == {case.top_k}
    loud = next(c for c in cases if c.name == "burst")
    assert [len(call[0]) for call in loud.routings] == [SHAPE.num_tokens * BURST_FACTOR] * 3
    everything = named_cases(replace(SHAPE, top_k=8), WORKLOADS, [2, 8], repeats=1, every=True)
    assert len(everything) == 2 * len(WORKLOADS)


def test_recorded_cases_take_the_last_steps_first() -> None:
    recorded = some_recorded()
    (case,) = recorded_cases(recorded, 4, 10, [2, 4], repeats=3)
    assert (case.top_k, case.num_experts) == (2, 16)
    for call, (step, layer) in zip(case.routings, [(2, 0), (2, 1), (1, 0)], strict=True):
        assert np.array_equal(np.stack(call), recorded.topk_idx[step, layer])


# -- prediction and measurement --------------------------------------------------------------------


def test_bytes_of_a_row() -> None:
    """Top-8: 8 float32 weights and 8 header entries of 12 bytes travel with a dispatched row."""
    assert row_bytes(COPIES[0], 2048, 8) == 4096
    assert row_bytes(ONCE[0], 2048, 8) == 4096 + 32 + 96
    assert row_bytes(ONCE[0], 2048, 3) == 4096 + 16 + 48  # each part padded to 16 bytes
    assert [row_bytes(way, 2048, 8) for way in ONCE[1:]] == [4096, 8192]


@pytest.mark.parametrize("top_k", [2, 8])
def test_predicted_ratio_of_uniform_choices(top_k: int) -> None:
    """3/4 of the copies leave their server; so do 3/4 of the distinct servers, as theory has it."""
    shape = replace(SHAPE, num_tokens=4000, top_k=top_k)
    (case,) = named_cases(shape, ["uniform"], [top_k], repeats=1, every=False)
    o = argparse.Namespace(servers=SERVERS, per_server=2, hidden=2048, scale_out=5.0)
    made = predict(case, o)
    expected = expected_distinct_servers(shape.placement.owner, RANKS, SERVERS, top_k)
    ratio = top_k / expected
    assert made.predicted(ONCE[1]) == pytest.approx(ratio, rel=0.01)
    assert made.predicted(ONCE[2]) == pytest.approx(ratio / 2, rel=0.01)
    header = row_bytes(ONCE[0], 2048, top_k) / 4096
    assert made.predicted(ONCE[0]) == pytest.approx(ratio / header, rel=0.01)
    assert made.rows_out(COPIES[0]) / made.num_tokens == pytest.approx(0.75 * top_k, rel=0.01)
    assert made.rows_out(ONCE[0]) / made.num_tokens == pytest.approx(0.75 * expected, rel=0.01)


def test_the_benchmark_runs_and_checks_what_it_moves(tmp_path: Path) -> None:
    file = tmp_path / "routing.npz"
    write_recorded(file, some_recorded())
    small = "--servers 2 --per-server 1 --tokens 6 --hidden 24 --top-k 2 --repeats 1 --experts 4"
    fast = "--scale-out 50 --scale-up 450 --only recorded uniform burst --recorded"
    run = subprocess.run(
        [sys.executable, "-m", "perf.moe_exchange", *small.split(), *fast.split(), str(file)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for name in ("recorded", "uniform", "burst"):
        assert any(line.split()[:2] == [name, "2"] for line in run.stdout.splitlines()), run.stdout
    assert "recorded: Python's own sources" in run.stdout
