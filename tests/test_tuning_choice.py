"""What a communicator launches with: argument, then environment, then profile, then default."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkern import AgreementError, Communicator
from fastkern.device.driver import DeviceProperties
from fastkern.device.host_driver import HostDriver
from fastkern.tuning.choose import choose_parameters
from fastkern.tuning.profile import Profile, SizeRule, format_profiles
from tests.device.communicators import device_communicator, message
from tests.processes import Pool
from tests.test_moe_calls import routing
from tests.test_num_blocks import logged

RULES = {
    "all_to_all_single": (SizeRule(256, 1), SizeRule(4096, 2)),
    "dispatch": (SizeRule(1 << 20, 4),),
}
HOST = Profile(architecture="host", transport="shm", num_blocks=3, num_lanes=2, chunk_bytes=96)
BY_SIZE = Profile(**{**vars(HOST), "operations": RULES})


def test_the_kernels_in_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own defaults, profiles and limits."""
    h200 = DeviceProperties("NVIDIA H200", "sm_90", 132, 1024, 1 << 37)
    monkeypatch.setenv("FASTKERN_PROFILE", "built-in")
    chosen = choose_parameters("peer", h200, None, "triton")
    assert (chosen.num_lanes, chosen.tile_bytes, chosen.blocks.most) == (256, 16384, 22)
    assert choose_parameters("peer", h200, None).num_lanes == 512
    few = DeviceProperties("a CPU", "host", 4, 2, 1 << 30)
    assert choose_parameters("peer", few, None, "triton").num_lanes == 2
    path = tmp_path / "tuning.json"
    path.write_text(
        format_profiles(
            [
                Profile(architecture="sm_90", num_lanes=1024, num_blocks=3),
                Profile(num_lanes=1024, tile_bytes=4096, num_blocks=5, kernels="triton"),
            ]
        )
    )
    monkeypatch.setenv("FASTKERN_PROFILE", str(path))
    chosen = choose_parameters("peer", h200, None, "triton")
    assert (chosen.num_lanes, chosen.tile_bytes, chosen.blocks.most) == (1024, 4096, 5)
    with pytest.raises(ValueError, match=r"num_lanes is 1024 for sm_90 .*at most 512"):
        choose_parameters("peer", h200, None)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def by_size(rank: int, num_ranks: int, path: str) -> None:
    """The bytes that a rank gives or gets decide, whichever are more: ranks differ."""
    with environment(FASTKERN_PROFILE=path), logged() as (comm, seen):
        for rows in (1, 16, 17, 64, 65, 256, 257, 1024, 1025):
            seen.clear()  # rows of 4 bytes, from every rank to rank 0
            mine = [rows] + [0] * 3
            got = torch.zeros(rows * num_ranks if rank == 0 else 0)
            comm.all_to_all_single(got, torch.ones(rows), [rows] * 4 if rank == 0 else None, mine)
            assert got.eq(1).all()
            sent = 4 * rows * (num_ranks if rank == 0 else 1)
            assert seen == [1 if sent <= 256 else 2 if sent <= 4096 else 3], (rank, rows)
        seen.clear()
        x, idx, weights = routing(rank, 9, 3, 6)
        recv, recv_weights, _, handle = comm.dispatch(x, idx, weights, num_experts=6)
        comm.combine(recv, handle, weights=recv_weights)
        comm.combine(recv, handle, weights=recv_weights, num_blocks=4)  # the most of any rule
        assert seen == [4, 3, 4]
        assert "1 to 4" in message(lambda: comm.combine(recv, handle, num_blocks=5))


def test_the_profile_says_how_many_blocks(four: Pool, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(format_profiles([BY_SIZE]))
    four.run(by_size, str(path))


def chosen(comm: Communicator, seen: list[int]) -> tuple[int, int, int]:
    """Blocks, lanes and chunk of a call."""
    seen.clear()
    out = torch.empty(comm.num_ranks)
    comm.all_to_all_single(out, torch.ones(comm.num_ranks))
    runtime: Any = comm._runtime
    lanes = runtime._launch_options(seen[0]).num_lanes
    settings: Any = comm._calls._settings
    return seen[0], lanes, settings.chunk_bytes


def order(rank: int, num_ranks: int, path: str) -> None:
    def choose(**options: Any) -> tuple[int, int, int]:
        with Communicator(servers=2, **options) as comm:
            runtime: Any = comm._runtime
            seen: list[int] = []
            host = runtime._host

            class Logging:
                def __getattr__(self, name: str) -> Any:
                    return getattr(host, name)

                def launch(self, *arguments: Any) -> bool:
                    seen.append(arguments[-1].num_blocks)
                    return bool(host.launch(*arguments))

            runtime._host = Logging()
            return chosen(comm, seen)

    assert choose() == (1, 1, 131072)
    with environment(FASTKERN_PROFILE=path):
        assert choose() == (3, 2, 96)
        with environment(FASTKERN_NUM_BLOCKS="5", FASTKERN_CHUNK_BYTES="200"):
            assert choose() == (5, 2, 200)
            assert choose(num_blocks=6, chunk_bytes=300) == (6, 2, 300)
        assert choose(num_blocks=2) == (2, 2, 96)
        assert choose(transport="shaped") == (1, 1, 131072)


def test_the_order_of_choice(four: Pool, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(format_profiles([HOST]))
    four.run(order, str(path))


def odd_file(rank: int, num_ranks: int, path: str) -> str:
    """Rank 2 has a file."""
    with environment(FASTKERN_PROFILE=path if rank == 2 else "built-in"):
        return message(lambda: Communicator(servers=2).close())


def test_a_file_that_is_broken_on_one_rank(four: Pool, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(format_profiles([HOST]).replace('"num_lanes": 2', '"num_lanes": -2'))
    texts = four.run(odd_file, str(path))
    assert len(set(texts)) == 1
    expected = f"ValueError: rank 2: tuning profile {path}: profiles[0].num_lanes must be a whole"
    assert texts[0].startswith(expected)


def test_lanes_that_a_block_does_not_have(four: Pool, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(format_profiles([HOST]).replace('"num_lanes": 2', '"num_lanes": 65'))
    texts = four.run(odd_file, str(path))
    assert len(set(texts)) == 1
    assert f"rank 2: tuning profile {path}: num_lanes is 65 for host over shm" in texts[0]


def test_profiles_with_different_chunks(four: Pool, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(format_profiles([HOST]))
    texts = four.run(odd_file, str(path))
    assert len(set(texts)) == 1
    where = "ranks disagree on chunk_bytes: rank 0 has 131072, rank 2 has 96"
    assert texts[0] == f"{AgreementError.__name__}: {where}"


def odd_blocks(rank: int, num_ranks: int, path: str) -> None:
    """Blocks and lanes may differ by rank."""
    with (
        environment(FASTKERN_PROFILE=path if rank == 2 else "built-in"),
        logged() as (comm, seen),
    ):
        assert chosen(comm, seen)[:2] == ((3, 2) if rank == 2 else (1, 1))


def test_profiles_with_different_blocks(four: Pool, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(format_profiles([Profile(**{**vars(HOST), "chunk_bytes": None})]))
    four.run(odd_blocks, str(path))


# -- on a device -----------------------------------------------------------------------------------


class SmallDriver(HostDriver):
    """A device that holds four blocks."""

    def resident_blocks(self, function: Any, num_lanes: int) -> int:
        return 4


def on_a_device(rank: int, num_ranks: int, path: str) -> list[str]:
    with environment(FASTKERN_PROFILE=path):
        with device_communicator(2) as comm:
            runtime: Any = comm._runtime
            found = (runtime.num_blocks, runtime.num_lanes, comm._calls._settings.chunk_bytes)
            assert found == (5, 1, 80)
            comm.barrier()
        driver = SmallDriver(most_lanes=2)
        options: dict[str, Any] = {"servers": 2, "transport": "peer", "backend": driver}
        texts = [message(lambda: Communicator(**options).close())]
        Communicator(**options, num_blocks=4).close()
        driver.close()
        return texts


def test_a_device_has_a_profile_too(four: Pool, tmp_path: Path) -> None:
    """Blocks that do not fit the device are refused when the communicator is made."""
    path = tmp_path / "tuning.json"
    rules = {"combine": (SizeRule(64, 5),)}
    profile = Profile(
        architecture="host",
        transport="peer",
        num_blocks=3,
        num_lanes=1,
        chunk_bytes=80,
        operations=rules,
    )
    path.write_text(format_profiles([HOST, profile]))
    for texts in four.run(on_a_device, str(path)):
        assert "the device holds 4 of 1 lanes at once" in texts[0], texts
