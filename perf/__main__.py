"""Run the benchmarks one after the other: python -m perf [NAME ...]."""

from __future__ import annotations

import argparse
import subprocess
import sys

NAMES = ("plan_time", "host_exchange", "shaped_exchange", "moe_exchange", "claims")


def main() -> None:
    """Each benchmark in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(NAMES)}")
    parser.add_argument("--csv", action="store_true", help="append rows to perf/results.csv")
    o = parser.parse_args()
    for name in o.names or NAMES:
        if name not in NAMES:
            parser.error(f"no benchmark {name!r}; there are {', '.join(NAMES)}")
        command = [sys.executable, "-m", f"perf.{name}", *(["--csv"] if o.csv else [])]
        if code := subprocess.run(command, check=False).returncode:
            sys.exit(code)


if __name__ == "__main__":
    main()
