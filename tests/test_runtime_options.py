"""Options, the environment, and the servers that ranks are on: agreed, or refused by name."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastkern import AgreementError, Communicator, shaped, shm
from fastkern.bootstrap import RankInfo, agreement_hash, detect_servers
from fastkern.config import Settings, read_settings
from fastkern.heap import own_identity
from tests.processes import Pool


def check(comm: Communicator) -> None:
    """Three rows per pair."""
    source = torch.arange(3 * comm.num_ranks) + 100 * comm.rank
    out = torch.full((3 * comm.num_ranks,), -1)
    comm.all_to_all_single(out, source)
    rows = [100 * src + 3 * comm.rank + k for src in range(comm.num_ranks) for k in range(3)]
    assert out.tolist() == rows


# -- servers ---------------------------------------------------------------------------------------


def infos(
    hosts: str, *, local: int | None = None, ranks: list[int] | None = None
) -> list[RankInfo]:
    """One rank per letter of `hosts`; global ranks count up unless given."""
    ranks = list(range(len(hosts))) if ranks is None else ranks
    return [
        RankInfo(host, rank, local, own_identity(), (("a", "1"),))
        for host, rank in zip(hosts, ranks, strict=True)
    ]


@pytest.mark.parametrize(
    ("hosts", "local", "ranks", "expected"),
    [
        ("aaaabbbb", None, None, (2, 4)),
        ("aaaabbbb", 4, None, (2, 4)),
        ("aaaabbbb", 2, None, (4, 2)),  # the launcher counts two servers per host
        ("aaaaaaaa", None, None, (1, 8)),
        ("aaaaaaaa", 4, None, (2, 4)),
        ("a", None, None, (1, 1)),
        ("abcd", 1, None, (4, 1)),
        ("aabb", 4, [1, 3, 4, 6], (2, 2)),  # a subgroup
        ("aa", 4, [1, 3], (1, 2)),
        ("aaab", None, None, (4, 1)),  # uneven
        ("aaaaa", 4, None, (5, 1)),
        ("abab", None, None, (4, 1)),  # not neighbours
        ("abba", None, None, (4, 1)),
        ("aabbaa", None, None, (6, 1)),
        ("aaaa", 4, [2, 3, 4, 9], (4, 1)),
    ],
)
def test_servers_are_detected(
    hosts: str,
    local: int | None,
    ranks: list[int] | None,
    expected: tuple[int, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert detect_servers(infos(hosts, local=local, ranks=ranks)) == expected
    fell_back = expected[1] == 1 and len(hosts) > 1 and len(set(hosts)) < len(hosts)
    assert bool([r for r in caplog.records if r.levelname == "WARNING"]) == fell_back


def by_launcher(rank: int, num_ranks: int, local_world_size: str) -> tuple[int, int]:
    os.environ["LOCAL_WORLD_SIZE"] = local_world_size
    try:
        with Communicator() as comm:
            check(comm)
            return comm.topology.servers, comm.topology.gpus_per_server
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


@pytest.mark.parametrize(
    ("local_world_size", "expected"), [("2", (2, 2)), ("1", (4, 1)), ("4", (1, 4)), ("3", (4, 1))]
)
def test_servers_as_the_launcher_says(
    four: Pool, local_world_size: str, expected: tuple[int, int]
) -> None:
    assert four.run(by_launcher, local_world_size) == [expected] * 4


# -- options ---------------------------------------------------------------------------------------


def with_options(rank: int, num_ranks: int, odd_rank: int, usual: Any, odd: Any) -> None:
    with Communicator(**(odd if rank == odd_rank else usual)) as comm:
        check(comm)


@pytest.mark.parametrize(
    ("usual", "odd", "name"),
    [
        ({"servers": 2}, {"servers": 4}, "servers"),
        ({"servers": 2}, {}, "servers"),
        ({}, {"policy": "split"}, "policy"),
        ({}, {"chunk_bytes": 4096}, "chunk_bytes"),
        ({}, {"buffer_bytes": 4096}, "buffer_bytes"),
        ({}, {"max_buffer_bytes": 4096}, "max_buffer_bytes"),
        ({}, {"transport": "shaped"}, "transport"),
        ({}, {"transport": shm(alpha_us=21)}, "transport"),
        ({"transport": shaped()}, {"transport": shaped(scale_out_GBps=0.5)}, "transport"),
    ],
)
def test_ranks_that_disagree_on_options(four: Pool, usual: Any, odd: Any, name: str) -> None:
    errors = four.errors(with_options, 2, usual, odd)
    assert {type(e) for e in errors} == {AgreementError}
    assert len({str(e) for e in errors}) == 1
    assert f"disagree on {name}: rank 0 has" in str(errors[0])
    assert "rank 2 has" in str(errors[0])


def test_agreement_is_by_value() -> None:
    assert agreement_hash(infos("aa")) == agreement_hash(infos("bbb"))
    other = RankInfo("a", 2, None, own_identity(), (("a", "2"),))
    with pytest.raises(AgreementError, match="disagree on a: rank 0 has 1, rank 2 has 2"):
        agreement_hash([*infos("aa"), other])


def test_options_that_may_differ(four: Pool) -> None:
    four.run(with_options, 1, {}, {"num_blocks": 3, "progress_timeout_s": 9.0, "debug": True})


BAD_OPTIONS = [
    {"servers": 3},
    {"servers": 0},
    {"servers": "two"},
    {"policy": "fastest"},
    {"transport": "carrier_pigeon"},
    {"num_blocks": 0},
    {"chunk_bytes": 0},
    {"buffer_bytes": -1},
    {"max_buffer_bytes": 0},
    {"progress_timeout_s": -1.0},
    {"entry_timeout_s": 0.0},
]


def make_only(rank: int, num_ranks: int, options: dict[str, Any]) -> None:
    Communicator(**options).close()


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_bad_options_are_refused_at_creation(four: Pool, options: dict[str, Any]) -> None:
    errors = four.errors(make_only, options)
    assert {type(e) for e in errors} <= {ValueError, TypeError}, errors
    assert next(iter(options)) in str(errors[0])


def bad_option_on_one_rank(rank: int, num_ranks: int, options: dict[str, Any]) -> None:
    """A group of its own, so that ranks left alone do not wait for long."""
    group = dist.new_group(range(num_ranks), timeout=timedelta(seconds=4))
    Communicator(group, **(options if rank == 2 else {})).close()


@pytest.mark.parametrize("options", [{"transport": "carrier_pigeon"}, {"num_blocks": 0}], ids=str)
def test_a_bad_option_on_one_rank_is_an_error_on_all(four: Pool, options: dict[str, Any]) -> None:
    errors = four.errors(bad_option_on_one_rank, options)
    assert {type(e) for e in errors} <= {ValueError, AgreementError}, errors


# -- environment -----------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without settings."""
    for name in [k for k in os.environ if k.startswith("FASTKERN_")] + ["LOCAL_WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_settings_from_the_environment(environment: pytest.MonkeyPatch) -> None:
    assert read_settings() == Settings()
    values = {
        "FASTKERN_TRANSPORT": "shaped",
        "FASTKERN_POLICY": "whole",
        "FASTKERN_NUM_BLOCKS": "3",
        "FASTKERN_CHUNK_BYTES": " 4096 ",
        "FASTKERN_BUFFER_BYTES": "0",
        "FASTKERN_MAX_BUFFER_BYTES": "77",
        "FASTKERN_ENTRY_TIMEOUT_S": "1.5",
        "FASTKERN_PROGRESS_TIMEOUT_S": "2",
        "FASTKERN_DEBUG": "1",
        "LOCAL_WORLD_SIZE": "8",
        "FASTKERN_BACKEND": "host",
    }
    for name, value in values.items():
        environment.setenv(name, value)
    expected = Settings("shaped", "whole", 3, 4096, 0, 77, 1.5, 2.0, True, 8, "host")
    assert read_settings() == expected
    for name in values:
        environment.setenv(name, "")
    assert read_settings() == Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FASTKERN_NUM_BLOCKS", "0"),
        ("FASTKERN_NUM_BLOCKS", "many"),
        ("FASTKERN_NUM_BLOCKS", "1.5"),
        ("FASTKERN_CHUNK_BYTES", "-4096"),
        ("FASTKERN_CHUNK_BYTES", "4k"),
        ("FASTKERN_BUFFER_BYTES", "-1"),
        ("FASTKERN_MAX_BUFFER_BYTES", "0"),
        ("FASTKERN_ENTRY_TIMEOUT_S", "0"),
        ("FASTKERN_ENTRY_TIMEOUT_S", "soon"),
        ("FASTKERN_ENTRY_TIMEOUT_S", "nan"),
        ("FASTKERN_PROGRESS_TIMEOUT_S", "-3"),
        ("FASTKERN_PROGRESS_TIMEOUT_S", "nan"),
        ("LOCAL_WORLD_SIZE", "eight"),
    ],
)
def test_a_bad_variable_is_named(environment: pytest.MonkeyPatch, name: str, value: str) -> None:
    environment.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}='{value}'"):
        read_settings()


def from_environment(rank: int, num_ranks: int, variables: dict[str, str]) -> str:
    os.environ.update(variables)
    try:
        with Communicator(policy="split") as comm:
            check(comm)
            assert comm.stats.plan is not None
            return f"{comm.transport.name} {comm.stats.plan.policy} {comm.topology.servers}"
    finally:
        for name in variables:
            del os.environ[name]


def test_arguments_win_over_the_environment(four: Pool) -> None:
    variables = {
        "FASTKERN_TRANSPORT": "shaped",
        "FASTKERN_POLICY": "whole",
        "LOCAL_WORLD_SIZE": "2",
        "FASTKERN_DEBUG": "1",
    }
    assert four.run(from_environment, variables) == ["shaped split 2"] * 4


@pytest.mark.parametrize(
    "variables", [{"FASTKERN_TRANSPORT": "pigeon"}, {"FASTKERN_NUM_BLOCKS": "x"}], ids=str
)
def test_a_bad_variable_on_all_ranks(four: Pool, variables: dict[str, str]) -> None:
    errors = four.errors(from_environment, variables)
    assert {type(e) for e in errors} == {ValueError}
    assert next(iter(variables.values())) in str(errors[0])
