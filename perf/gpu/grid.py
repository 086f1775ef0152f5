"""Groups of correctness cases: all_to_all, moe, static, replays, deadlines."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

from .cases import GROUPS, run_cases, some_of
from .session import begin


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where a case was wrong. Several groups share the time that is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", required=True, nargs="+", choices=GROUPS)
    parser.add_argument("--most", type=int, help="cases of a group, spread over all that it has")
    session = begin(parser, arguments)
    groups, most, wrong = session.args.group, session.args.most, 0
    try:
        for k, group in enumerate(groups):
            now = time.monotonic()
            part = replace(session, end=now + (session.end - now) / (len(groups) - k))
            cases = GROUPS[group](part)
            wrong += run_cases(part, group, cases if most is None else some_of(cases, most))
    finally:
        session.driver.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
