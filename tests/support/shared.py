"""Which tests run together: those of a file, those that share one Airflow, and those that share one Spark session; and what they share.

Shared servers stop before the tests of other folders, because an idle Airflow takes almost half a core.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.sampling import ALL

TESTS = Path(__file__).parent.parent
ONE_AIRFLOW = "tests/e2e"
ONE_PAGE = "tests/e2e/page"
ONE_STACK = "tests/chaos"
ONE_SPARK = "one Spark session"
SHARED = {name: ExitStack() for name in ("e2e", "chaos", ONE_PAGE, ONE_SPARK)}
"""What to stop after the last test of a folder or of a scope."""
OWN_SERVERS = {f"{ONE_AIRFLOW}/{name}.py" for name in ("test_demo", "test_teams")}
"""End-to-end tests that start their own Airflow."""
IN_ONE_SPARK = {
    f"tests/integration/{name}.py"
    for name in ("consume/test_evolve", "formats/test_decoding", "offsets/test_log_truncated", "retry/test_drain_spark",
                 "rewind/test_cancelled_batch", "sink/test_deletes", "sink/test_staged", "sink/test_tables", "spark/test_engine_cancel",
                 "spark/test_form")
}  # fmt: skip
"""The files with tests on the fixture `session_here`: starting and warming up a JVM costs 15 CPU seconds."""
COSTS = TESTS / "costs.tsv"


def stop_unless_needed_by(item: pytest.Item | None) -> None:
    for name, ends in SHARED.items():
        if item is None or name not in (item.path.relative_to(TESTS).parts[0], scope(item.nodeid)):
            ends.close()


def scope(nodeid: str) -> str:
    """What one worker runs: a file, because its tests share slow fixtures, or all files that share an Airflow, a Spark or a stack."""
    file = nodeid.partition("::")[0]
    if file in IN_ONE_SPARK:
        return ONE_SPARK
    if file.startswith(ONE_STACK) and not ALL:  # all of them would be a shard of their own
        return ONE_STACK
    if file.startswith(ONE_PAGE):
        return ONE_PAGE
    return ONE_AIRFLOW if file.startswith(ONE_AIRFLOW) and file not in OWN_SERVERS else file


def costs() -> dict[str, float]:
    """The CPU seconds of each scope, as of the last run whose table was kept."""
    found: dict[str, float] = {}
    for line in COSTS.read_text().splitlines():
        cpu_s, file = line.split("\t")
        found[scope(file)] = found.get(scope(file), 0) + float(cpu_s)
    return found


def shard(scopes: Iterable[str], number: int, of: int, costs: Mapping[str, float]) -> set[str]:
    """The scopes of shard ``number`` (from 1) of ``of``. The shards cost about the same and together have every scope once."""
    shards: list[tuple[float, set[str]]] = [(0.0, set()) for _ in range(of)]
    for one in sorted(scopes, key=lambda one: (-costs.get(one, 0.5), one)):
        lightest = min(range(of), key=lambda place: shards[place][0])
        cost, members = shards[lightest]
        shards[lightest] = (cost + costs.get(one, 0.5), members | {one})
    return shards[number - 1][1]
