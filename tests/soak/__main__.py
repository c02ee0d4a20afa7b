"""``python -m tests.soak``, also as ``make soak``."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
from pathlib import Path

from rich.console import Console

from tests.soak import report
from tests.soak.broker import Unfinished
from tests.soak.plan import Fault
from tests.soak.run import Options, soak

OUTPUT = Path(__file__).resolve().parents[2] / "build" / "soak.json"


def main() -> int:
    """Returns 0 without anomalies, 1 if something is wrong or the soak has no verdict, and 130 if it was interrupted."""
    arguments = _parser().parse_args()
    console = Console(highlight=False, soft_wrap=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    options = Options(arguments.minutes * 60, arguments.seed, kinds=tuple(arguments.only or Fault))
    try:
        result = soak(options, lambda text: console.print(text, markup=False))
    except KeyboardInterrupt:
        console.print(f"interrupted; nothing is left running. Seed {arguments.seed}", markup=False)
        return 130
    except Unfinished as error:
        console.print(f"no verdict: {error}. Seed {arguments.seed}", markup=False)
        return 1
    report.show(result, console)
    report.write(result, OUTPUT)
    console.print(f"written to {OUTPUT}", markup=False)
    return 1 if result.problems() else 0


def _interrupt(*_: object) -> None:
    """Ignores further signals, so that nothing interrupts the clean-up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Producers, consumers and random faults, and then a checker.")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long faults go on (30)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of all random choices; another one each time")
    parser.add_argument(
        "--only", type=Fault, action="append", metavar="FAULT", help=f"of all kinds this one; may be repeated: {', '.join(Fault)}"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
