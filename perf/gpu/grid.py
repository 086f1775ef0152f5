"""One group of correctness cases: all_to_all, moe, static, replays or deadlines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .cases import GROUPS, run_cases
from .session import begin


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where a case was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", required=True, choices=GROUPS)
    session = begin(parser, arguments)
    try:
        wrong = run_cases(session, session.args.group, GROUPS[session.args.group](session))
    finally:
        session.driver.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
