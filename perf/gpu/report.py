"""Puts what the steps found into one JSON file and one short table. Standard library only.

Exit code 1 where a correctness case was wrong, or a step that must run did not end well, or ran no
case. Steps that ended before their last case, for want of time, are named in the last line. Those
of the kernels in Triton need not run where Triton is not there, and say so.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .record import read_record

SCHEMA = 1
GROUPS = ("all_to_all", "moe", "static", "replays", "deadlines")  # of correctness
MUST_RUN = ("build", "detect", *GROUPS)
TRITON = ("triton_compile", "triton", "triton_measure")  # what must be noted, and may be not run
NOT_RUN = 77  # exit code of a step that finds that it cannot be
_TIMED_OUT = (124, 137)
_LEAST_S = 5  # the script starts no step with less time
DRY = "dry: CPU, no claim about a GPU"


def commit() -> str:
    """Short hash of the checkout, with + when it has changes; "unknown" outside one."""
    try:
        return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The steps in order, as the script noted them: name, exit code or "-", seconds, limit."""
    steps = []
    for line in (folder / "steps.tsv").read_text().splitlines():
        name, code, seconds, limit = line.split("\t")
        found = read_record(folder / f"{name}.json")
        steps.append({"name": name, "status": _status(code), "seconds": int(seconds)} | found)
        steps[-1]["limit_s"] = int(limit)
    _add_reasons(steps)
    return steps


def _add_reasons(steps: Iterable[dict[str, Any]]) -> None:
    """Why steps were not run, as a fact of theirs."""
    no_triton = None
    for step in steps:
        if step["status"] != "not run":
            continue
        if step["name"] in TRITON and (no_triton or "detail" in step["facts"]):
            no_triton = no_triton or step["facts"]["detail"]
            step["facts"].setdefault("detail", no_triton)
        elif step["limit_s"] < _LEAST_S:
            step["facts"]["time_cut"] = "not run: no time was left"


def _status(code: str) -> str:
    if code in ("-", str(NOT_RUN)):
        return "not run"
    if int(code) in _TIMED_OUT:
        return "timed out"
    return "ok" if int(code) == 0 else "failed"


def summary(steps: list[dict[str, Any]], dry: bool, seconds: int) -> dict[str, Any]:
    """The whole, as perf/README.md describes it."""
    facts: dict[str, Any] = {}
    for step in steps:
        if step["name"] == "detect":
            facts = dict(step["facts"])
    cases = [case | {"step": step["name"]} for step in steps for case in step["cases"]]
    bad = [s["name"] for s in steps if s["status"] in ("failed", "timed out")]
    bad += [s["name"] for s in steps if s["status"] == "not run" and s["name"] in MUST_RUN]
    bad += [s["name"] for s in steps if s["name"] in GROUPS and not s["cases"]]
    bad += [s["name"] for s in steps if s["name"] == "triton" and _ended_empty(s)]
    missing = [name for name in (*MUST_RUN, *TRITON) if name not in {s["name"] for s in steps}]
    wrong = sum(not case["ok"] for case in cases)
    return {
        "schema": SCHEMA,
        "dry": dry,
        "note": DRY if dry else "",
        "ok": not bad and not missing and not wrong,
        "commit": commit(),
        "python": platform.python_version(),
        "seconds": seconds,
        "target": facts.get("target", "none"),
        "device": {key: value for key, value in facts.items() if key not in ("target", "detail")},
        "steps": [
            {key: s[key] for key in ("name", "status", "seconds", "limit_s", "facts")}
            for s in steps
        ],
        "cases": cases,
        "measures": [m for step in steps for m in step["measures"]],
    }


def _ended_empty(step: dict[str, Any]) -> bool:
    return step["status"] == "ok" and not step["cases"]


def table(found: dict[str, Any]) -> str:
    """The short table."""
    lines = [f"fastkern GPU check: {found['note'] or found['target']}"]
    device = found["device"]
    if device:
        lines.append(
            f"{device.get('device', '?')}, {device.get('architecture', '?')}, "
            f"{device.get('processors', '?')} processors; commit {found['commit']}, "
            f"Python {found['python']}; {found['seconds']} s"
        )
    lines.append(f"{'step':<15} {'result':<10} {'cases right':>12} {'s':>5}")
    for step in found["steps"]:
        own = [case for case in found["cases"] if case["step"] == step["name"]]
        right = f"{sum(c['ok'] for c in own)}/{len(own)}" if own else ""
        lines.append(f"{step['name']:<15} {step['status']:<10} {right:>12} {step['seconds']:>5}")
        lines += [f"  {text}" for text in _remarks(step["facts"], own)]
    lines += _measure_lines([m for m in found["measures"] if "over_cxx" not in m])
    lines += _ratio_lines([m for m in found["measures"] if "over_cxx" in m])
    cut = [s["name"] for s in found["steps"] if any(key.endswith("_cut") for key in s["facts"])]
    right = f"right as far as it went: no time for all of {', '.join(cut)}" if cut else "all right"
    if any(s["name"] == "triton" and s["status"] == "not run" for s in found["steps"]):
        right += "; no kernel in Triton was run"
    lines.append(right if found["ok"] else "NOT RIGHT: see above")
    if found["dry"]:
        lines.append(DRY)
    return "\n".join(lines)


def _remarks(facts: dict[str, Any], cases: Iterable[dict[str, Any]]) -> list[str]:
    texts = [str(v) for k, v in facts.items() if k == "detail" or k.endswith("_cut")]
    wrong = [case for case in cases if not case["ok"]]
    texts += [f"wrong: {case['name']}: {case['error'].strip()[:300]}" for case in wrong[:3]]
    return texts + ([f"and {len(wrong) - 3} more"] if len(wrong) > 3 else [])


def _measure_lines(measures: Sequence[dict[str, Any]]) -> list[str]:
    if not measures:
        return []
    lines = [f"{'measure':<15} {'case':<46} {'p50 us':>9} {'GB/s':>8} {'of copy':>8}"]
    for m in measures:
        rate = m.get("GBps", m.get("algorithmic_GBps"))
        share = m.get("share_of_copy")
        lines.append(
            f"{m['name']:<15} {m['case']:<46} {m['p50_us']:>9.1f} "
            f"{'' if rate is None else f'{rate:.1f}':>8} "
            f"{'' if share is None else f'{share:.0%}':>8}"
        )
    return lines


def _ratio_lines(measures: Sequence[dict[str, Any]]) -> list[str]:
    """The kernels in Triton beside those in C++: medians, taking turns."""
    if not measures:
        return []
    columns = f"{'C++ us':>9} {'Triton us':>10} {'ratio':>7}"
    lines = [f"{'Triton / C++':<15} {'case':<44} {columns}"]
    for m in measures:
        lines.append(
            f"{m['name']:<15} {m['case']:<44} {m['cxx_p50_us']:>9.1f} {m['p50_us']:>10.1f} "
            f"{m['over_cxx']:>7.2f}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the folder of the steps' files, writes the JSON file, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seconds", required=True, type=int)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args(arguments)
    found = summary(read_steps(args.folder), args.dry, args.seconds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    print(f"JSON: {args.out}")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
