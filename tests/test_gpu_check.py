"""perf/gpu_check.sh, whose dry run does on the CPU what it does on a GPU, and its parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fastkern.device.host_driver import HostDriver
from fastkern.device.virtual_all_to_all import AllToAll
from fastkern.device.virtual_cluster import VirtualCluster, VirtualOptions
from fastkern.errors import DeviceUnavailableError
from fastkern.planner import Topology
from perf.gpu.bench import all_to_all_outputs, poison_all
from perf.gpu.cases import Case, run_cases
from perf.gpu.detect import find_target
from perf.gpu.grid import main as grid_main
from perf.gpu.record import Record, read_record
from perf.gpu.report import GROUPS, MUST_RUN, TRITON, main, read_steps, summary, table
from perf.gpu.sanitize import verdict
from perf.gpu.session import DRY, Session
from perf.gpu.stages import measured_alone, queue_rows
from tests.device.virtual_cases import expected_rows, random_rows

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "perf" / "gpu_check.sh"
STAGES = {"pack", "put", "redistribute", "land", "intra", "reduce"}


def run_script(*arguments: str | Path, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    command = ["bash", SCRIPT, "--python", sys.executable, *arguments]
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=SCRIPT.parent,
    )


@pytest.mark.timeout(900)  # a busy machine cuts no step short: see `slack` in the script
def test_a_dry_run_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = run_script("--dry", "--scratch", tmp_path / "scratch", "--out", out, timeout_s=850)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == f"JSON: {out}"
    assert lines[-2] == "dry: CPU, no claim about a GPU"
    assert lines[-3] == "all right"
    found = json.loads(out.read_text())
    assert found["schema"] == 1
    assert found["dry"] is True
    assert found["note"] == "dry: CPU, no claim about a GPU"
    assert found["ok"] is True
    assert (found["target"], found["device"]["architecture"]) == ("host", "host")
    names = [step["name"] for step in found["steps"]]
    assert names == [*MUST_RUN, "measure", *TRITON, "sanitize"]
    assert {step["status"] for step in found["steps"]} == {"ok"}
    groups = {case["group"] for case in found["cases"]}
    assert groups == {*GROUPS, "same_bits", "small"}
    assert all(case["ok"] for case in found["cases"])
    assert sum(case["step"] == "all_to_all" for case in found["cases"]) == 20
    assert sum(case["step"] == "moe" for case in found["cases"]) >= 15
    assert sum(case["step"] == "static" for case in found["cases"]) == 10
    in_triton = [case["group"] for case in found["cases"] if case["step"] == "triton"]
    assert in_triton == ["all_to_all"] * 2 + ["moe"] * 2 + ["static"] * 2 + ["replays"]
    both = [m for m in found["measures"] if "over_cxx" in m]
    assert [m["name"] for m in both] == ["all-to-all", "route", *["dispatch", "combine"] * 2]
    assert {m["kernels"] for m in both} == {"triton"}
    measures = [m for m in found["measures"] if m not in both]
    assert {m["kernels"] for m in measures} == {"cxx"}
    measured = {m["name"] for m in measures}
    assert measured == STAGES | {"copy", "launch to done", "static exchange", "all-to-all"}
    for m in both:
        assert m["over_cxx"] == pytest.approx(m["p50_us"] / m["cxx_p50_us"], rel=0.01), m
    for m in measures:
        assert 0 < m["p20_us"] <= m["p50_us"] <= m["p80_us"], m
        assert (m["name"] in STAGES) == ("share_of_copy" in m), m
        assert m.get("bytes", 1) > 0, m
    tokens = [m["case"] for m in found["measures"] if m["name"] == "launch to done"]
    assert [int(case.split()[1]) for case in tokens[::2]] == [1, 16, 128]
    static = [m["case"] for m in found["measures"] if m["name"] == "static exchange"]
    assert static == [
        f"{name}, {num} tokens, 1 blocks, {way}"
        for name in ("dispatch", "dispatch+combine")
        for num in (1, 16, 128)
        for way in ("graph", "eager")
    ]


def test_arguments_that_are_wrong_are_refused() -> None:
    for arguments in (("--target", "tpu"), ("--wet",), ("--out",)):
        done = run_script(*arguments)
        assert done.returncode == 2, arguments
        assert "perf/gpu_check.sh [--target auto|cuda|hip]" in done.stderr


# -- what goes wrong must show ---------------------------------------------------------------------


def fail() -> None:
    raise AssertionError("wrong rows on rank 2")


def test_a_wrong_case_is_recorded_and_does_not_hide_the_others(tmp_path: Path) -> None:
    record = Record(tmp_path / "all_to_all.json")
    driver = HostDriver()
    session = Session(driver, DRY, record, float("inf"), 0, None)  # type: ignore[arg-type]
    cases = [Case("good", lambda: None), Case("bad", fail), Case("good too", lambda: None)]
    assert run_cases(session, "all_to_all", cases) == 1
    driver.close()
    found = read_record(tmp_path / "all_to_all.json")["cases"]
    assert [case["ok"] for case in found] == [True, False, True]
    assert found[1]["error"] == "AssertionError: wrong rows on rank 2"


def test_one_bit_that_arrives_wrong_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = AllToAll.run

    def run(self: AllToAll) -> None:
        given(self)
        if int(self.splits[:, -1].sum()):  # the last rank has received rows
            memory = self._memory.copier
            byte = memory.read(self.output[-1], 1)
            memory.write(self.output[-1], byte ^ 1)

    monkeypatch.setattr(AllToAll, "run", run)
    out = tmp_path / "found.json"
    arguments = ["--target", "host", "--group", "all_to_all", "--out", str(out), "--seed", "1"]
    assert grid_main(arguments) == 1
    cases = read_record(out)["cases"]
    assert len(cases) == 20
    wrong = [case for case in cases if not case["ok"]]
    assert len(wrong) > 10
    assert all("all-to-all: rank" in case["error"] for case in wrong)


def steps_in(folder: Path, **codes: str) -> None:
    """A run's files, in which every step took 3 s."""
    names = (*MUST_RUN, "measure", *TRITON)
    lines = [f"{name}\t{codes.get(name, '0')}\t3\t30" for name in names]
    (folder / "steps.tsv").write_text("\n".join(lines) + "\n")
    Record(folder / "detect.json").add_facts(target="cuda", device="Some GPU")
    for group in (*GROUPS, "triton"):
        Record(folder / f"{group}.json").add_case(group, "2x2 whole", True, 0.1)
    Record(folder / "measure.json").add_measure("pack", "all", p20_us=1.0, p50_us=2.0, p80_us=3.0)


@pytest.mark.parametrize(
    ("step", "code", "status"),
    [("moe", "1", "failed"), ("moe", "124", "timed out"), ("moe", "-", "not run")],
)
def test_a_step_that_did_not_end_well_fails_the_whole(
    tmp_path: Path, step: str, code: str, status: str
) -> None:
    steps_in(tmp_path)
    assert summary(read_steps(tmp_path), False, 9)["ok"] is True
    steps_in(tmp_path, measure="-")
    assert summary(read_steps(tmp_path), False, 9)["ok"] is True
    steps_in(tmp_path, **{step: code})
    found = summary(read_steps(tmp_path), False, 9)
    assert found["ok"] is False
    assert [s["status"] for s in found["steps"] if s["name"] == step] == [status]
    assert len(found["measures"]) == 1  # the others' findings are there
    text = table(found)
    assert "NOT RIGHT" in text
    assert "Some GPU" in text
    out = tmp_path / "out.json"
    assert main(["--folder", str(tmp_path), "--out", str(out), "--seconds", "9"]) == 1
    assert json.loads(out.read_text())["ok"] is False


def test_a_wrong_case_fails_the_whole_though_its_step_ended_well(tmp_path: Path) -> None:
    steps_in(tmp_path)
    Record(tmp_path / "moe.json").add_case("moe", "top-8", False, 0.1, "sums of rank 0")
    found = summary(read_steps(tmp_path), False, 9)
    assert found["ok"] is False
    assert "wrong: top-8: sums of rank 0" in table(found)


def test_a_group_without_a_case_fails_the_whole(tmp_path: Path) -> None:
    steps_in(tmp_path)
    assert table(summary(read_steps(tmp_path), False, 9)).splitlines()[-1] == "all right"
    (tmp_path / "static.json").unlink()
    found = summary(read_steps(tmp_path), False, 9)
    assert found["ok"] is False
    assert "NOT RIGHT" in table(found)


def test_a_group_cut_short_is_named(tmp_path: Path) -> None:
    steps_in(tmp_path)
    record = Record(tmp_path / "moe.json")
    record.add_case("moe", "top-1", True, 0.1)
    record.add_facts(moe_cut="no more time at top-8")
    found = summary(read_steps(tmp_path), False, 9)
    assert found["ok"] is True
    lines = table(found).splitlines()
    assert lines[-1] == "right as far as it went: no time for all of moe"
    assert any("no more time at top-8" in line for line in lines)


def test_no_gpu_is_said_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(target: str) -> HostDriver:
        raise DeviceUnavailableError(f"no library of {target}")

    monkeypatch.setattr("perf.gpu.detect.open_driver", refuse)
    text = r"no GPU can be opened here. cuda: no library of cuda \| hip: no library of hip"
    with pytest.raises(DeviceUnavailableError, match=text):
        find_target("auto")


def test_what_the_sanitizer_says() -> None:
    good = "========= ERROR SUMMARY: 0 errors"
    bad = "========= Invalid write\n========= ERROR SUMMARY: 3 errors"
    assert verdict(good, 0) == (True, "")
    assert verdict(bad, 9) == (False, "exit 9, ERROR SUMMARY: 3 errors")
    assert verdict(good, 1)[0] is False  # a case was wrong under the tool
    assert verdict("========= Error: Device not supported", 0)[0] is None
    assert verdict("", 127)[0] is None


# -- stages alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "queues"),
    [((2, 3), ("pack", "push", "put", "receive", "land", "take")), ((1, 3), ("push", "take"))],
)
def test_stages_alone_move_what_the_whole_call_moves(
    shape: tuple[int, int], queues: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(1)
    num_ranks = shape[0] * shape[1]
    splits = rng.integers(0, 9, (num_ranks, num_ranks))
    driver = HostDriver()
    given = VirtualOptions(policy="whole", chunk_bytes=64)
    with VirtualCluster(driver, Topology(*shape), 2, 2, options=given) as cluster:
        call = cluster.prepare_all_to_all(splits, 16)
        inputs = [random_rows(int(n), (16,), torch.uint8, rng) for n in splits.sum(axis=1)]
        call.write_inputs(inputs)
        call.run()
        tables = [call.plan.table(rank) for rank in range(num_ranks)]
        for left_out in (*queues, None):
            poison_all(cluster, all_to_all_outputs(call))
            for queue in queues:
                if queue != left_out:

                    def twice(enqueue: object) -> None:
                        enqueue()  # type: ignore[operator]
                        enqueue()  # type: ignore[operator]

                    measured_alone(cluster, call.launch, tables, queue, twice)
            got = call.read_outputs((16,), torch.uint8)
            right = all(map(torch.equal, got, expected_rows(splits, inputs)))
            assert right == (left_out is None), left_out  # and each of them is needed
        server = np.arange(num_ranks) // shape[1]
        between = int(splits[server[:, None] != server[None, :]].sum())
        assert queue_rows(tables, "put") == queue_rows(tables, "pack") == between
        assert queue_rows(tables, "receive") == between
        assert queue_rows(tables, "push") == int(splits.sum()) - between
        call.close()
    assert driver.leftovers() == []
    driver.close()
