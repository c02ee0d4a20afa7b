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
    options = Options(
        arguments.minutes * 60,
        arguments.seed,
        arguments.rate,
        arguments.every,
        kinds=tuple(arguments.only or Fault),
        folder=arguments.folder,
    )
    try:
        result = soak(options, lambda text: console.print(text, markup=False))
    except KeyboardInterrupt:
        console.print(f"interrupted; nothing is left running. Seed {arguments.seed}", markup=False)
        return 130
    except Unfinished as error:
        console.print(f"no verdict: {error}. Seed {arguments.seed}", markup=False)
        return 1
    report.show(result, console)
    report.write(result, arguments.output)
    console.print(f"written to {arguments.output}", markup=False)
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
    parser.add_argument("--rate", type=float, default=2_500.0, help="records a second of all producers (2500)")
    parser.add_argument("--every", type=float, default=6.0, metavar="SECONDS", help="between faults, on average (6)")
    parser.add_argument(
        "--only", type=Fault, action="append", metavar="FAULT", help=f"of all kinds this one; may be repeated: {', '.join(Fault)}"
    )
    parser.add_argument("--folder", type=Path, help="where data and logs are kept; a temporary folder, kept if something is wrong")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the result as JSON (build/soak.json)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
