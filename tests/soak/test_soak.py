"""A short soak, so that the long one works when it is needed."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.soak import report
from tests.soak.plan import ALWAYS_AT_A_STEP, ON_CONSUMERS, Fault, faults
from tests.soak.run import Options, soak
from tidemark.sink.steps import Step

ON_DRIVERS = set(ON_CONSUMERS)
ON_PRODUCERS = {Fault.HUNG_TRANSACTION, Fault.KILL_COMMITTING}
SEED = 2333
"""Its first faults are of all sorts, so that a slow machine, where few faults happen, sees all sorts too."""


def of_all_sorts(faults: Collection[Fault]) -> bool:
    found = set(faults)
    return bool(found & ON_DRIVERS and found & ON_PRODUCERS and {Fault.CRASH_POSTGRES, Fault.KILL_BROKER} <= found)


@pytest.mark.thorough
def test_short_soak_strikes_drivers_servers_and_producers_and_finds_no_anomaly(tmp_path: Path) -> None:
    """Two groups share a topic while faults of every sort happen for half a minute: all that was committed is stored once, nothing else."""
    lines: list[str] = []
    options = Options(27, SEED, rate=800, every_s=1.6, patience_s=0, consumers=("function", "arrow"), enough=of_all_sorts)

    def say(line: str) -> None:
        lines.append(line)
        sys.stdout.write(f"{line}\n")  # pytest shows it if the soak does not finish

    result = soak(options, say)
    log = "\n".join(lines)
    assert result.problems() == [], log
    assert f"seed {SEED}" in lines[0]
    assert of_all_sorts(set(result.faults)), log
    assert all(f"{fault} " in log for fault in result.faults)
    assert 0 < result.rows < 2 * result.produced
    assert result.batches > 2
    assert result.snapshots > 10
    report.write(result, tmp_path / "soak.json")
    written = json.loads((tmp_path / "soak.json").read_text())
    assert (written["seed"], written["problems"], set(written["anomalies"].values())) == (SEED, [], {0})


def test_seed_gives_the_same_faults_again_and_another_seed_gives_others() -> None:
    """The kind, target, step and waits are the same, so that a finding can be looked for again."""
    first, again, other = (list(itertools.islice(faults(seed, ["a", "b"], 5), 40)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_each_kind_of_fault_comes_before_any_comes_again() -> None:
    """A soak of a few minutes injects every kind of fault. Each consumer has its turn, and faults that need a step have one."""
    planned = list(itertools.islice(faults(3, ["a", "b", "c"], 5), 3 * len(Fault)))
    for number in range(3):
        assert {one.fault for one in planned[number * len(Fault) : (number + 1) * len(Fault)]} == set(Fault)
    assert {one.consumer for one in planned if one.fault in ON_DRIVERS} == {"a", "b", "c"}
    assert all(one.step in ALWAYS_AT_A_STEP[one.fault] for one in planned if one.fault in ALWAYS_AT_A_STEP)
    assert {one.step for one in itertools.islice(faults(3, ["a"], 5), 300)} == {None, *Step}
    assert all(2.5 <= one.after_s <= 7.5 for one in planned)
