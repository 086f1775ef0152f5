"""`fastkern tune`: candidates, rounds, choice and profile, on the CPU's driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fastkern.cli import app
from fastkern.device import compile_triton, virtual_kernels
from fastkern.device.cuda_driver import CudaDriver
from fastkern.device.host_driver import HostDriver
from fastkern.device.memory import release_leftovers
from fastkern.device.triton_driver import TritonDriver
from fastkern.device.triton_image import unpack_image
from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.device.virtual_kernels import ENTRY_OF
from fastkern.planner import Topology
from fastkern.tuning import search
from fastkern.tuning.calls import prepared_call
from fastkern.tuning.profile import OPERATIONS, Profile, SizeRule, format_profiles
from fastkern.tuning.search import Measured, measure
from fastkern.tuning.search_space import SearchOptions, Shape, search_space
from fastkern.tuning.select import select
from fastkern.tuning.store import find_profile, read_profiles
from tests.demo_cases import command
from tests.device.recording_cuda import RecordedCuda
from tests.device.test_triton_driver import an_image

KIB = 1 << 10


class SmallDriver(HostDriver):
    """Holds 64 lanes at once; notes the grids of its launches."""

    def __init__(self) -> None:
        super().__init__(most_lanes=4)
        self.grids: list[tuple[int, int]] = []

    def resident_blocks(self, function: Any, num_lanes: int) -> int:
        super().resident_blocks(function, num_lanes)
        return 64 // num_lanes

    def launch(self, function: Any, grid: int, num_lanes: int, *rest: Any) -> None:
        if function.name in virtual_kernels.PERSISTENT:
            self.grids.append((grid, num_lanes))
        super().launch(function, grid, num_lanes, *rest)


@pytest.fixture
def driver() -> Iterator[SmallDriver]:
    made = SmallDriver()
    yield made
    assert release_leftovers() == 0
    left = made.leftovers()
    made.close()
    assert left == []


def options(**given: Any) -> SearchOptions:
    return SearchOptions(
        **{"topology": Topology(2, 2), "sizes": [4 * KIB], "rounds": 3, "warm_ups": 1, **given}
    )


# -- candidates ------------------------------------------------------------------------------------


def test_candidates_that_do_not_fit_are_left_out(
    driver: SmallDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = search_space(driver, options(num_blocks=[16, 1, 8, 17], num_lanes=[1, 4, 2, 8]))
    assert found.blocks == {(1, 0): (1, 8, 16), (4, 0): (1,), (2, 0): (1, 8)}
    assert set(found.left_out) == {
        "17 blocks of 1 lanes",
        *(f"{n} blocks of 4 lanes" for n in (8, 16, 17)),
        *(f"{n} blocks of 2 lanes" for n in (16, 17)),
        *(f"{n} blocks of 8 lanes" for n in (1, 8, 16, 17)),  # of more than a block has
    }
    monkeypatch.setitem(virtual_kernels.TEAM_LANES, "host", 2)
    assert list(search_space(driver, options(num_lanes=[1, 2, 3, 4])).blocks) == [(2, 0), (4, 0)]


def test_candidates_of_a_device(driver: SmallDriver) -> None:
    found = search_space(driver, options(sizes=[]))
    assert set(found.blocks) == {(1, 0), (2, 0), (4, 0)}
    for (lanes, _), blocks in found.blocks.items():
        assert list(blocks) == sorted(blocks)
        assert blocks[0] == 1
        assert 4 * blocks[-1] * lanes <= 64
    assert 131072 in found.chunk_bytes
    assert all(size & (size - 1) == 0 for size in found.sizes)
    assert not found.left_out


@pytest.mark.parametrize(("ranks", "given"), [(65, {}), (2, {"num_blocks": [33]})])
def test_nothing_that_fits(driver: SmallDriver, ranks: int, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="holds none of the candidates") as caught:
        search_space(driver, options(topology=Topology(1, ranks), **given))
    assert "blocks of 4 lanes" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("operations", ["reduce"]),
        ("sizes", [3 * KIB]),
        ("sizes", [0]),
        ("num_blocks", [0]),
        ("num_blocks", [1025]),
        ("num_lanes", [-1]),
        ("chunk_bytes", [0]),
        ("tile_bytes", [24]),
        ("tile_bytes", [8]),
        ("tile_bytes", [1 << 18]),
        ("rounds", 0),
    ],
)
def test_what_cannot_be_searched(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        options(**{name: value})


class TritonStandIn(SmallDriver):
    """Kernels that look like those in Triton, whose tiles take lanes' registers; the C++ ones run.

    A driver of target "host" in name: what a search asks of it is what it asks of a GPU.
    """

    kernels = "triton"

    def load_module(self, image: bytes) -> Any:
        module = super().load_module(image)
        module.tile_bytes = unpack_image(image).constants.get("TILE_BYTES", 0) if image else 0
        return module

    def resident_blocks(self, function: Any, num_lanes: int) -> int:
        assert function.module.tile_bytes in (64, 128)
        return super().resident_blocks(function, num_lanes) * 64 // function.module.tile_bytes


def test_candidates_of_the_kernels_in_triton() -> None:
    """Lanes and tiles together: what fits is asked of kernels that are compiled for both."""
    driver = TritonStandIn()
    given = {"num_blocks": [1, 2, 8, 16], "num_lanes": [1, 2], "tile_bytes": [64, 128]}
    found = search_space(driver, options(**given, chunk_bytes=[512, 1024]))
    assert found.blocks == {
        (1, 64): (1, 2, 8, 16),
        (2, 64): (1, 2, 8),
        (1, 128): (1, 2, 8),
        (2, 128): (1, 2),
    }
    assert "16 blocks of 1 lanes and tiles of 128 bytes" in found.left_out
    assert len(found.shapes) == 8
    assert Shape(2, 1024, 128) in found.shapes
    driver.close()
    with pytest.raises(ValueError, match="kernels in C\\+\\+ have no tiles"):
        search_space(SmallDriver(), options(tile_bytes=[64]))


def test_candidates_of_a_gpu_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default: the lanes and the tile that are usual, and those beside them."""
    driver = TritonDriver(CudaDriver(0, RecordedCuda()))
    asked = []

    def load(entry: str, target: str, arch: str, num_lanes: int, constants: Any) -> bytes:
        asked.append((entry, num_lanes, constants["TILE_BYTES"]))
        return an_image("cuda", num_lanes, *[k for k, of in ENTRY_OF.items() if of == entry])

    monkeypatch.setattr(compile_triton, "compile_triton", load)
    found = search_space(driver, options())
    lanes, tiles = (128, 256, 512), (8192, 16384, 32768)
    assert list(found.blocks) == [(n, tile) for tile in tiles for n in lanes]
    assert len(asked) == len(set(asked)) == 9 * 3


# -- measuring -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("size", [16, 64 * KIB])
def test_calls_are_of_their_size(driver: SmallDriver, op: str, size: int) -> None:
    with (
        VirtualCluster(driver, Topology(2, 2)) as cluster,
        prepared_call(cluster, op, size, seed=1) as call,
    ):
        least = max(size, 64)  # a row of 16 bytes to each of 4 ranks
        assert least / 2 <= call.num_bytes <= 16 * least


def test_every_candidate_is_launched_in_every_round(driver: SmallDriver) -> None:
    given = options(num_blocks=[1, 2], num_lanes=[1, 2], chunk_bytes=[512, 4 * KIB])
    space = search_space(driver, given)
    noted: list[str] = []
    found = measure(driver, space, given, noted.append)
    assert noted == [f"{op}, 4096 bytes" for op in OPERATIONS]
    shapes = [Shape(lanes, chunk) for lanes in (1, 2) for chunk in (512, 4 * KIB)]
    keys = [(m.op, m.size, m.shape, m.num_blocks) for m in found]
    assert len(set(keys)) == len(keys) == 3 * 4 * 2
    assert {m.shape for m in found} == set(shapes)
    assert all(m.median_us > 0 for m in found)
    # 4 ranks; each candidate once in each of 4 turns, by two chunks; and the first runs with as
    # many blocks as fit, one of each operation and one more for combine's dispatch
    grids = Counter(driver.grids)
    for lanes in (1, 2):
        assert grids[4, lanes] == 3 * 4 * 2
        assert grids[8, lanes] == 3 * 4 * 2 + 2 * 4


def test_drift_hits_all_candidates_alike(
    driver: SmallDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device gets slower all the time; what is slower by itself is found all the same."""
    clock = 0
    turns: list[tuple[Any, int]] = []

    def once(cluster: Any, call: Any, op: str, num_blocks: int, flush: Any) -> float:
        nonlocal clock
        clock += 1
        turns.append((cluster.num_lanes, num_blocks))
        return (1000.0 + 100 * (num_blocks == 2)) * (1 + 0.002 * clock)

    monkeypatch.setattr(search, "_once", once)
    given = options(
        operations=["dispatch"], num_blocks=[1, 2, 4], num_lanes=[1], chunk_bytes=[512], rounds=31
    )
    found = measure(driver, search_space(driver, given), given)
    rounds = [turns[k : k + 3] for k in range(0, len(turns), 3)]
    assert len(rounds) == 1 + 31
    assert all(sorted(taken) == [(1, 1), (1, 2), (1, 4)] for taken in rounds)
    assert len({tuple(taken) for taken in rounds}) > 3, "always in the same order"
    medians = {m.num_blocks: m.median_us for m in found}
    assert medians[2] / medians[1] == pytest.approx(1.1, abs=0.01)
    assert medians[4] / medians[1] == pytest.approx(1.0, abs=0.01)


# -- choosing --------------------------------------------------------------------------------------

SHAPES = (Shape(256, 1 << 15), Shape(512, 1 << 17))


def measured(op: str, size: int, shape: Shape, times: dict[int, float]) -> list[Measured]:
    return [Measured(op, size, shape, blocks, us, size) for blocks, us in times.items()]


def test_the_fewest_blocks_that_are_as_fast() -> None:
    slow, fast = SHAPES
    found = select(
        [
            *measured("dispatch", 64, slow, {1: 50.0, 8: 40.0}),
            *measured("dispatch", 64, fast, {1: 30.8, 2: 30.0, 8: 33.0}),
            *measured("dispatch", 128, slow, {1: 60.0, 8: 55.0}),
            *measured("dispatch", 128, fast, {1: 40.0, 2: 40.0, 8: 39.9}),
            *measured("dispatch", 1024, slow, {1: 90.0, 8: 50.0}),  # the best here, not over all
            *measured("dispatch", 1024, fast, {1: 90.0, 2: 60.0, 8: 51.0}),
            *measured("combine", 64, slow, {1: 9.0}),
            *measured("combine", 64, fast, {1: 9.0, 2: 8.0, 8: 7.0}),
            *measured("combine", 128, slow, {1: 9.0}),
            *measured("combine", 128, fast, {1: 9.0, 2: 8.0, 8: 7.0}),
            *measured("combine", 1024, slow, {1: 9.0}),
            *measured("combine", 1024, fast, {1: 20.0, 2: 9.0, 8: 9.0}),
        ]
    )
    assert found.shape == fast
    assert found.num_blocks == 8
    assert found.operations == {
        "dispatch": (SizeRule(128, 1),),
        "combine": (SizeRule(128, 8), SizeRule(1024, 2)),
    }
    assert found.best["dispatch", 64].median_us == 30.8


# -- the command -----------------------------------------------------------------------------------

TINY = (
    *("tune", "--driver", "host", "--sizes", "4K,64k", "--blocks", "1,2,999"),
    *("--lanes", "1,2", "--chunks", "8K,128K", "--rounds", "2"),
)


def test_tune_writes_a_profile_that_is_then_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.json"
    other = Profile(architecture="sm_90", num_blocks=9)
    path.write_text(format_profiles([other]))
    ended = command(*TINY, FASTKERN_PROFILE=str(path))
    assert ended.returncode == 0, ended.stderr
    assert "left out, does not fit: 999 blocks of 2 lanes" in ended.stdout
    assert all(op in ended.stdout for op in OPERATIONS)
    assert "written to" in ended.stdout
    assert ended.stderr == ""
    kept, made = read_profiles(path)
    assert kept == other
    assert made.measured
    assert "2 x 2 ranks on one device" in (made.measured_with or "")
    assert (made.architecture, made.transport) == ("host", "peer")
    assert made.num_blocks in (1, 2)
    assert made.num_lanes in (1, 2)
    assert made.chunk_bytes in (8 * KIB, 128 * KIB)
    monkeypatch.setenv("FASTKERN_PROFILE", str(path))
    properties = HostDriver().properties()
    assert find_profile("host", properties.name, "peer") == (made, str(path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--driver", "gpu"), "driver must be auto, cuda, hip or host"),
        (("--backend", "cuda"), "backend must be auto or triton, not 'cuda'"),
        (("--backend", "triton"), "backend triton is tuned on a GPU"),
        (("--tiles", "16K"), "tile_bytes: the kernels in C++ have no tiles"),
        (("--tiles", "17K"), "tile_bytes must be powers of two"),
        (("--driver", "auto"), "sees no GPU; --driver host"),
        (("--driver", "auto", "--backend", "triton"), "sees no GPU; backend triton is tuned on"),
        (("--sizes", "5K"), "sizes must be powers of two"),
        (("--sizes", "4K,,8K"), "sizes: '' is no whole number"),
        (("--blocks", "many"), "blocks: 'many' is no whole number"),
        (("--operations", "all"), "operations must be of all_to_all_single"),
        (("--transport", "pigeon"), "transport must be one of shm"),
        (("--blocks", "999"), "holds none of the candidates"),
    ],
)
def test_bad_options_fail_on_one_line(
    arguments: tuple[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "tuning.json"
    ended = CliRunner().invoke(app, [*TINY, "--output", str(path), *arguments])
    assert ended.exit_code == 1
    assert ended.output.startswith("fastkern tune: FAILED: ")
    assert words in ended.output
    assert ended.output.count("\n") == 1
    assert not path.exists()


def test_a_file_that_cannot_be_added_to_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastkern.tuning.tune.measure", lambda *_: pytest.fail("measured"))
    path = tmp_path / "tuning.json"
    path.write_text("{}")
    ended = CliRunner().invoke(app, [*TINY, "--output", str(path)])
    assert ended.exit_code == 1
    assert f"tuning profile {path}: not a tuning profile" in ended.output
    assert path.read_text() == "{}"
