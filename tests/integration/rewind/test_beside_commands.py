"""The commands of `docs/rewind.md` for a rewind beside, as a user types them: each with its own process and a driver."""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

from tests.support.documented import snippets
from tests.support.records import numbers
from tests.support.scenario import Scenario

DDL = "payload text"
TRANSFORM = """
    from typing import TypedDict

    from tidemark.transform import Record


    class Row(TypedDict):
        payload: str


    def transform(record: Record) -> Row:
        return {{"payload": record.value.decode() + "{suffix}"}}
"""


def test_commands_of_the_page_replay_compare_and_swap(scenario: Scenario) -> None:
    topic = scenario.feed(numbers(0, 30), TRANSFORM.format(suffix=" old"), DDL)
    scenario.run()
    scenario.transform(TRANSFORM.format(suffix=" new"))
    (block,) = (code for code in snippets("docs/rewind.md", "sh") if "rewind swap" in code)
    documented = [line.split("#")[0].split() for line in block.replace("\\\n", " ").splitlines()]
    assert [words[:3] for words in documented] == [["tidemark", "rewind", word] for word in ("plan", "apply", "replay", "verify", "swap")]

    planned = done(scenario, "rewind", "plan", scenario.name, "--to-offset", "10", "--beside", "--reason", "the suffix was wrong")
    assert "20 offsets read again beside the live rows" in planned
    assert "read beside: 20 offsets" in planned
    begun = done(scenario, "rewind", "apply", "1")
    assert "began rewind 1; to read its records: tidemark rewind replay 1" in begun
    replayed = done(scenario, "rewind", "replay", "1")
    assert f"{scenario.name}: level with the group" in replayed
    assert "tidemark rewind verify 1; then tidemark rewind swap 1, or tidemark rewind discard 1" in replayed
    old = [f"record {number} old" for number in range(30)]
    assert scenario.rows() == old
    (compared,) = json.loads(done(scenario, "rewind", "verify", "1", "-o", "json"))
    assert {name: compared[name] for name in ("equal", "changed", "gone", "new", "left")} == {
        "equal": 0, "changed": 20, "gone": 0, "new": 0, "left": 0,
    }  # fmt: skip

    scenario.topics.produce(topic, numbers(30, 34))
    scenario.run()
    swapped = done(scenario, "rewind", "swap", "1")
    assert re.search(r"Swapped by \S+ at", swapped)
    assert scenario.rows() == [*old[:10], *(f"record {number} new" for number in range(10, 34))]
    assert "was already swapped" in done(scenario, "rewind", "swap", "1")

    (scenario.folders[0] / "rehearsed.py").write_text(textwrap.dedent(TRANSFORM.format(suffix=" maybe")))
    rehearsal = ("rewind", "plan", scenario.name, "--to-offset", "20", "--beside", "--reason", "what would it do", "--transform")
    refused = scenario.command(*rehearsal, "rehearse:transform")
    assert (refused.returncode, "there is no rehearse.py in" in refused.stderr) == (1, True)
    assert "Rehearses the transform rehearsed:transform" in done(scenario, *rehearsal, "rehearsed:transform")
    done(scenario, "rewind", "apply", "2")
    replayed = done(scenario, "rewind", "replay", "2")
    assert "compare: tidemark rewind verify 2; then tidemark rewind discard 2" in replayed
    (compared,) = json.loads(done(scenario, "rewind", "verify", "2", "-o", "json"))
    assert {row["now"]["payload"][-5:] for row in compared["examples"]["changed"]} == {"maybe"}
    refused = scenario.command("rewind", "swap", "2")
    assert (refused.returncode, "only rehearses rehearsed:transform" in refused.stderr) == (1, True)
    refused = scenario.command("rewind", "plan", scenario.name, "--to-earliest", "--beside", "--reason", "two at the same time")
    assert (refused.returncode, "tidemark rewind discard 2" in refused.stderr) == (1, True)
    done(scenario, "rewind", "discard", "2", "--reason", "nobody needs this replay")
    assert states(scenario) == [(1, "APPLIED"), (2, "DISCARDED")]


def done(scenario: Scenario, *words: str) -> str:
    finished = scenario.command(*words)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout if "json" in words else re.sub(r"\s+", " ", finished.stdout + finished.stderr)


def states(scenario: Scenario) -> list[tuple[Any, ...]]:
    return scenario.sql("SELECT rewind_id, state FROM tidemark.rewind ORDER BY 1")
