"""`python -m tests.conformance [FILE ...]`: runs the cases in these files; the exit status is 1 if any case failed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.conformance import generators, judge
from tests.conformance.cases import OWN_FILE, Case, load


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description="Run files of assignor cases.")
    parser.add_argument("files", nargs="*", type=Path, default=[OWN_FILE], metavar="FILE")
    options = parser.parse_args(arguments)
    passed = failed = 0
    for file in options.files:
        for case in load(file):
            problems = _problems(case)
            if problems:
                failed += 1
                print(f"FAILED {case.assignor} {case.name}: {'; '.join(problems)}")  # noqa: T201
            else:
                passed += 1
    print(f"{passed} passed, {failed} failed")  # noqa: T201
    return 1 if failed else 0


def _problems(case: Case) -> list[str]:
    try:
        return judge.judge(case) if case.generator is None else generators.run(case)
    except Exception as error:  # noqa: BLE001 - a case that cannot be run is a failed case, and the others still run
        return [f"{type(error).__name__}: {error}"]


if __name__ == "__main__":
    sys.exit(main())
