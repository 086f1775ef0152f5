"""The command line: the demo from start to end, plans, refusals on one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fastkern
from fastkern.cli import app
from tests.demo_cases import command, words_missing

TINY = ("--ranks-per-server", "2", "--steps", "3", "--repeats", "1", "--tokens-per-rank", "100")


def test_demo_end_to_end() -> None:
    ended = command("demo", *TINY, "--shaped", "--experts", "7")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    words = (
        "2 servers x 2 ranks as processes; 7 experts, top-4, rows of 1024 bytes",
        "max / mean",
        "Rows of a dispatch",
        "per server (fastkern)",
        "per choice",
        "bound",
        "gloo ms",
        "spreadout",
        "ms / bound",
        "OK: all 4 ranks agree with the layer in one process, bit by bit",
    )
    assert words_missing(ended.stdout, words) == []
    assert "no rows" not in ended.stdout


def test_demo_without_tokens() -> None:
    ended = command("demo", *TINY, "--ranks-per-server", "1", "--tokens-per-rank", "0", "--shaped")
    assert ended.returncode == 0, ended.stderr
    assert "OK: all 2 ranks agree" in ended.stdout


@pytest.mark.parametrize(("name", "who"), [("demo", "FASTKERN_"), ("train-demo", "rank ")])
def test_bad_variables_fail_on_one_line(name: str, who: str) -> None:
    options = TINY if name == "demo" else ["--steps", "1"]
    ended = command(name, *options, "--ranks-per-server", "1", FASTKERN_CHUNK_BYTES="many")
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"fastkern {name}: FAILED: {who}")
    assert "FASTKERN_CHUNK_BYTES='many' is not a number" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["demo", "train-demo"])
def test_bad_options_fail_on_one_line(name: str) -> None:
    ended = CliRunner().invoke(app, [name, "--experts", "1", "--top-k", "2"])
    assert ended.exit_code == 1
    text = f"fastkern {name}: FAILED: top_k must be at most 32 and the 1 experts, not 2\n"
    assert ended.output == text


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.split() == [
        "fastkern",
        fastkern.__version__,
    ]


def test_plan_describes_a_matrix(tmp_path: Path) -> None:
    matrix = [[0, 3, 5, 1], [1, 0, 9, 2], [4, 4, 0, 0], [7, 0, 1, 0]]
    (tmp_path / "rows.csv").write_text("\n".join(",".join(map(str, row)) for row in matrix))
    options = ["--servers", "2", "--row-bytes", "1000000", "--policy", "whole"]
    by_csv = CliRunner().invoke(app, ["plan", str(tmp_path / "rows.csv"), *options])
    by_json = CliRunner().invoke(app, ["plan", "-", *options], input=json.dumps(matrix))
    assert by_csv.exit_code == by_json.exit_code == 0
    assert by_csv.output == by_json.output
    assert "2 servers x 2 ranks, rows of 1000000 bytes" in by_csv.output
    assert "bound 9 (100.0% of the bound)" in by_csv.output


@pytest.mark.parametrize(
    ("matrix", "text"),
    [
        ("[[1, 2], [3, -4]]", "traffic[1][1] is -4"),
        ("1,2\n3,x", "'x'"),
        ("1,2\n3", "not a square matrix"),
        ('{"rows": 1}', "not a square matrix"),
        ("[[1, 2", "Expecting"),
        ("", "must have shape [1, 1]"),
    ],
)
def test_plan_refuses_on_one_line(matrix: str, text: str) -> None:
    ended = CliRunner().invoke(app, ["plan", "-"], input=matrix)
    assert ended.exit_code == 1
    assert ended.output.startswith("fastkern plan: FAILED: ")
    assert text in ended.output
    assert ended.output.count("\n") == 1
