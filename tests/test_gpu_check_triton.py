"""The steps of perf/gpu_check.sh with the kernels in Triton: what is missing, wrong, too slow."""

from __future__ import annotations

import multiprocessing as mp
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastkern.device import interpreter_driver
from fastkern.device.host_driver import HostDriver
from fastkern.device.interpret import interpret
from fastkern.device.virtual_combine import Combine
from fastkern.errors import DeviceUnavailableError
from perf.gpu import compare, session
from perf.gpu.cases import Case, some_of
from perf.gpu.grid import main as grid_main
from perf.gpu.record import Record, read_record
from perf.gpu.report import NOT_RUN, TRITON, read_steps, summary, table
from perf.gpu.session import DRY, GPU_TRITON
from perf.gpu.triton_images import Job, compiled, jobs_of
from perf.gpu.triton_images import main as compile_main
from tests.test_gpu_check import steps_in
from tests.triton.interpreted import Interpreter

# -- compiling -------------------------------------------------------------------------------------


def test_what_is_compiled() -> None:
    jobs = [(job.entry, job.num_lanes) for job in jobs_of("cuda", "sm_90", 1024)]
    first, second = GPU_TRITON.lanes
    large = ["exchange", "dispatch", "combine"]
    wanted = [(name, lanes) for lanes in (first, second) for name in large] + [("route", 128)]
    assert sorted(jobs) == sorted(wanted)
    assert jobs[0] == ("exchange", first)


def test_images_are_compiled_beside_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTKERN_CACHE_DIR", str(tmp_path))
    jobs = [Job("cuda", "sm_90", "route", 128), Job("cuda", "sm_90", "rout", 128)]
    found = {job.entry: error for job, _, error in compiled(jobs, 2, time.monotonic() + 240)}
    assert found["route"] == ""
    assert "no entry 'rout' in Triton" in found["rout"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()]


def test_images_that_take_too_long_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTKERN_CACHE_DIR", str(tmp_path))
    before = set(mp.active_children())  # pools of other tests
    jobs, start = [Job("cuda", "sm_90", "route", 128)] * 3, time.monotonic()
    assert list(compiled(jobs, 2, start + 0.2)) == []
    assert time.monotonic() - start < 10
    assert set(mp.active_children()) <= before


def test_a_machine_without_triton_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    steps_in(tmp_path, triton_compile=str(NOT_RUN), triton="-", triton_measure="-")
    (tmp_path / "triton.json").unlink()
    out = tmp_path / "triton_compile.json"
    assert compile_main(["--target", "host", "--out", str(out)]) == NOT_RUN
    assert capsys.readouterr().out == "Triton is not installed\n"
    found = summary(read_steps(tmp_path), False, 9)
    assert found["ok"] is True
    text = table(found)
    assert text.count("  not run: Triton is not installed") == len(TRITON) == 3
    assert text.splitlines()[-1] == "all right; no kernel in Triton was run"


def test_a_triton_that_cannot_be_imported_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        raise ImportError("libtriton.so: cannot open")

    monkeypatch.setattr("fastkern.device.triton_library.importlib.import_module", broken)
    out = tmp_path / "found.json"
    with pytest.raises(SystemExit, match=r"libtriton\.so: cannot open"):
        compile_main(["--target", "host", "--out", str(out)])
    assert "libtriton.so" in read_record(out)["facts"]["detail"]


def test_the_kernels_are_those_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "open_driver", lambda target: HostDriver())
    with pytest.raises(DeviceUnavailableError, match="run on host here, not on cuda"):
        session.open_kernels("cuda", "triton")


# -- cases -----------------------------------------------------------------------------------------


def test_some_cases_are_spread_over_all() -> None:
    cases = [Case(str(k), lambda: None) for k in range(40)]
    assert [case.name for case in some_of(cases, 8)] == [str(k) for k in range(0, 40, 5)]
    assert some_of(iter(cases[:3]), 8) == cases[:3]


def combine_does_nothing(out: str) -> tuple[int, list[dict[str, Any]]]:
    """In a process that interprets: its kernel in Triton is not run."""

    def without_combine(name: str, *args: Any) -> None:
        if name != "fastkern_combine":
            interpret(name, *args)

    interpreter_driver.interpret = without_combine  # type: ignore[assignment]
    arguments = ["--kernels", "triton", "--group", "all_to_all", "moe", "--most", "2"]
    code = grid_main(["--target", "host", "--seed", "1", "--out", out, *arguments])
    return code, read_record(Path(out))["cases"]


def test_a_kernel_in_triton_that_is_wrong_is_found(tmp_path: Path) -> None:
    with Interpreter() as interpreter:
        code, cases = interpreter.run(combine_does_nothing, str(tmp_path / "found.json"))
    assert code == 1
    assert [(case["group"], case["ok"]) for case in cases] == [
        ("all_to_all", True),
        ("all_to_all", True),
        ("moe", False),
        ("moe", False),
    ]
    assert "combine" in cases[2]["error"]


# -- measures --------------------------------------------------------------------------------------


@pytest.fixture
def two_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second driver in the place of the one with the kernels in Triton, with all ranks, which the
    interpreter cannot hold."""
    scale = replace(DRY, stage_rows=8, repeats=7)
    monkeypatch.setattr(compare, "open_kernels", lambda target, kernels: HostDriver())
    monkeypatch.setattr(compare, "scale_of", lambda driver: scale)


def test_operations_take_turns(tmp_path: Path, two_sides: None) -> None:
    out = tmp_path / "found.json"
    assert compare.main(["--target", "host", "--out", str(out)]) == 0
    found = read_record(out)["measures"]
    assert [(m["name"], m["case"]) for m in found] == [
        ("all-to-all", "0.0 MB per rank, 1 blocks"),
        ("route", "8 tokens of a rank"),
        ("dispatch", "1 tokens per rank, 1 blocks"),
        ("combine", "1 tokens per rank, 1 blocks"),
        ("dispatch", "8 tokens per rank, 1 blocks"),
        ("combine", "8 tokens per rank, 1 blocks"),
    ]
    for m in found:
        assert 0 < m["cxx_p20_us"] <= m["cxx_p50_us"] <= m["cxx_p80_us"], m
        assert m["over_cxx"] == pytest.approx(m["p50_us"] / m["cxx_p50_us"], rel=0.01), m


def test_other_bits_are_no_measure(
    tmp_path: Path, two_sides: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, calls = Combine.read, []

    def read(self: Combine) -> Any:
        sums = given(self)
        calls.append(len(sums))
        if len(calls) == 2:  # of the other side
            sums[-1].view(-1)[0] += 1
        return sums

    monkeypatch.setattr(Combine, "read", read)
    out = tmp_path / "found.json"
    assert compare.main(["--target", "host", "--out", str(out)]) == 1
    found = read_record(out)
    assert len(found["cases"]) == 6
    (wrong,) = (case for case in found["cases"] if not case["ok"])
    assert wrong["name"].startswith("combine, 1 tokens per rank")
    assert wrong["error"].endswith("C++ and Triton give other bits")
    assert [m["name"] for m in found["measures"]] == [
        *("all-to-all", "route", "dispatch", "dispatch", "combine"),
    ]


def test_no_time_for_all_measures_is_said(tmp_path: Path, two_sides: None) -> None:
    out = tmp_path / "found.json"
    assert compare.main(["--target", "host", "--out", str(out), "--seconds", "0"]) == 0
    assert read_record(out)["facts"]["same_bits_cut"].startswith("no more time at all-to-all, ")


# -- report ----------------------------------------------------------------------------------------


def test_ratios_have_a_table_of_their_own(tmp_path: Path) -> None:
    steps_in(tmp_path)
    times = {"p20_us": 29.0, "p50_us": 30.0, "p80_us": 31.0}
    figures = {"cxx_p20_us": 11.0, "cxx_p50_us": 12.0, "cxx_p80_us": 13.0, "over_cxx": 2.5}
    record = Record(tmp_path / "triton_measure.json")
    record.add_measure("dispatch", "128 tokens", kernels="triton", **times, **figures)
    lines = table(summary(read_steps(tmp_path), False, 9)).splitlines()
    assert lines[-3].split() == ["Triton", "/", "C++", "case", "C++", "us", "Triton", "us", "ratio"]
    assert lines[-2].split() == ["dispatch", "128", "tokens", "12.0", "30.0", "2.50"]
    assert sum("128 tokens" in line for line in lines) == 1


def test_steps_that_no_time_was_left_for_are_named(tmp_path: Path) -> None:
    steps_in(tmp_path, triton="-", triton_measure="-")
    text = (tmp_path / "steps.tsv").read_text().replace("triton\t-\t3\t30", "triton\t-\t0\t4")
    (tmp_path / "steps.tsv").write_text(text)
    found = summary(read_steps(tmp_path), False, 9)
    assert found["ok"] is True
    lines = table(found).splitlines()
    assert "  not run: no time was left" in lines
    text = "right as far as it went: no time for all of triton; no kernel in Triton was run"
    assert lines[-1] == text


@pytest.mark.parametrize("name", TRITON)
def test_a_step_in_triton_that_fails_fails_the_whole(tmp_path: Path, name: str) -> None:
    steps_in(tmp_path, **{name: "1"})
    assert summary(read_steps(tmp_path), False, 9)["ok"] is False
    steps_in(tmp_path)
    text = (tmp_path / "steps.tsv").read_text()
    (tmp_path / "steps.tsv").write_text(text.replace(f"{name}\t0\t3\t30\n", ""))
    assert summary(read_steps(tmp_path), False, 9)["ok"] is False


def test_a_cut_of_the_grid_without_a_case_fails_the_whole(tmp_path: Path) -> None:
    steps_in(tmp_path)
    (tmp_path / "triton.json").unlink()
    assert summary(read_steps(tmp_path), False, 9)["ok"] is False
