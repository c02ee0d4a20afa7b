"""``tidemark rewind`` and ``tidemark seek``, as users call them, on a group that has read records."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient
from tests.support.scenario import Scenario
from tests.support.shell import tidemark

REASON = ("--reason", "the transform was wrong")


@pytest.fixture
def group(scenario: Scenario) -> Scenario:
    """A consumer that has read two partitions, the first of them in two runs: ``a0`` to ``a5``, and ``b0`` to ``b3``."""
    topic = scenario.topics.create(2)
    scenario.write(topics=topic).make_sink()
    scenario.topics.produce(topic, ["a0", "a1", "a2"])
    scenario.topics.produce(topic, ["b0", "b1", "b2", "b3"], partition=1)
    scenario.run()
    scenario.topics.produce(topic, ["a3", "a4", "a5"])
    scenario.run()
    return scenario


def topic_of(group: Scenario) -> str:
    return group.spec.topics[0]


def planned(group: Scenario, *words: str) -> dict[str, Any]:
    """The JSON that ``rewind plan`` prints."""
    done = tidemark(group, "rewind", "plan", group.name, *words, *REASON, "--output", "json")
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def new_offsets(plan: dict[str, Any]) -> dict[int, int]:
    return {part["partition"]: part["new"] for part in plan["groups"][0]["partitions"]}


def positions(group: Scenario) -> list[int]:
    return list(group.positions().values())


def rewinds(group: Scenario) -> list[tuple[int, str]]:
    return group.sql("SELECT rewind_id, state FROM tidemark.rewind ORDER BY 1")


def plain(text: str) -> str:
    """The text of a box without its frame and line breaks."""
    return " ".join(text.replace("│", " ").split())


def test_plan_changes_nothing_apply_does_it_and_undo_puts_it_back(group: Scenario) -> None:
    """Plans and applies a rewind, then its undo; the list shows both."""
    before = group.rows("payload")
    done = tidemark(group, "rewind", "plan", group.name, "--to-earliest", "--topic", f"{topic_of(group)}:0", *REASON)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "nothing has changed yet; to apply it: tidemark rewind apply 1\n"
    assert "At least 6 offsets read again, 0 skipped; 6 rows and 0 failed records taken out" in plain(done.stdout)
    assert (positions(group), group.rows("payload")) == ([6, 4], before)

    applied = tidemark(group, "rewind", "apply", "1")
    assert (applied.returncode, applied.stderr) == (0, "applied rewind 1\n")
    assert "Rewind 1 (APPLIED)" in applied.stdout
    assert (positions(group), group.rows("payload")) == ([0, 4], [b"b0", b"b1", b"b2", b"b3"])

    undo = tidemark(group, "rewind", "undo", "1", "--reason", "it was right after all", "--output", "json")
    assert json.loads(undo.stdout)["scenario"] == {"scenario": "undo", "rewind_id": 1}
    assert tidemark(group, "rewind", "apply", "2").returncode == 0
    assert (positions(group), group.rows("payload")) == ([6, 4], before)
    group.check()

    listed = json.loads(tidemark(group, "rewind", "list", group.name, "--output", "json").stdout)
    assert [(one["rewind_id"], one["state"], one["undo_of"]) for one in listed] == [(2, "APPLIED", 1), (1, "UNDONE", None)]
    assert {one["applied_by"] for one in listed} == {listed[0]["planned_by"]}
    lines = [line.split() for line in tidemark(group, "rewind", "list").stdout.splitlines()]
    assert [line[:2] for line in lines if line and line[0].isdigit()] == [["2", "APPLIED"], ["1", "UNDONE"]]
    assert tidemark(group, "rewind", "list", "nobody", "--output", "json").stdout == "[]\n"


def test_replay_after_a_rewind_makes_the_same_rows(group: Scenario) -> None:
    """The group needs no restart and no other command: its next run starts at the rewound positions."""
    before = group.rows("payload")
    plan = planned(group, "--to-offset", "2")
    assert tidemark(group, "rewind", "apply", str(plan["rewind_id"])).returncode == 0
    assert group.rows("payload") == [b"a0", b"a1", b"b0", b"b1"]
    assert "replaying until 6 after rewind 1" in tidemark(group, "offsets", group.name).stdout
    group.run()
    assert group.rows("payload") == before
    group.check()
    done = tidemark(group, "rewind", "verify", str(plan["rewind_id"]), "--output", "json")
    (found,) = json.loads(done.stdout)
    counted = [found[name] for name in ("replayed", "left", "equal", "changed", "gone", "new")]
    assert counted == [6, 0, 6, 0, 0, 0]
    assert "6 offsets read again" in group.command("rewind", "verify", str(plan["rewind_id"]), wide=False).stdout
    assert "replaying" not in tidemark(group, "offsets", group.name).stdout
    removed = tidemark(group, "maintain", "--keep", "0s", env={"TIDEMARK_KEEP_AT_LEAST": "0s"})
    assert (removed.returncode, removed.stdout) == (0, "removed 6 rows taken out by rewind 1\n")
    gone = tidemark(group, "rewind", "verify", str(plan["rewind_id"]))
    assert (gone.returncode, "are no longer kept" in gone.stderr) == (1, True)


def test_each_place_to_go_to_has_its_option(group: Scenario) -> None:
    """The options have Kafka's names. No plan is applied, so each starts from the same positions."""
    topic = topic_of(group)
    committed = ConsumerGroupTopicPartitions("old-one", [TopicPartition(topic, 0, 1), TopicPartition(topic, 1, 3)])
    admin = AdminClient({"bootstrap.servers": group.topics.servers})  # kept, because its futures end with it
    (done,) = admin.alter_consumer_group_offsets([committed]).values()
    done.result()
    ((first_batch,),) = group.sql("SELECT min(batch_id) FROM tidemark.batch WHERE partition = 0")
    (group.folder / "offsets.csv").write_text(f'"{topic}",0,4\n')
    year = str(datetime.now(UTC).year - 1)
    wanted: dict[tuple[str, ...], dict[int, int]] = {
        ("--to-earliest",): {0: 0, 1: 0},
        ("--to-latest",): {0: 6, 1: 4},
        ("--to-current",): {0: 6, 1: 4},
        ("--to-offset", "3"): {0: 3, 1: 3},
        ("--shift-by", "-2"): {0: 4, 1: 2},
        ("--to-datetime", f"{year}-03-29 14:00", "--zone", "Europe/Berlin"): {0: 0, 1: 0},
        ("--by-duration", "PT0S"): {0: 6, 1: 4},
        ("--from-file", "offsets.csv"): {0: 4},
        ("--from-group", "kafka:old-one"): {0: 1, 1: 3},
        ("--to-batch", str(first_batch)): {0: 0},
    }
    assert {words: new_offsets(planned(group, *words)) for words in wanted} == wanted
    assert positions(group) == [6, 4]


def test_plan_fits_a_terminal_and_is_markdown_where_wished(group: Scenario) -> None:
    plan = planned(group, "--to-earliest")
    narrow = group.command("rewind", "show", str(plan["rewind_id"]), wide=False).stdout
    assert [line.split() for line in narrow.splitlines() if line.split()[:1] in (["0"], ["1"])] == [
        ["0", "6", "0", "-6", "6", "0"],
        ["1", "4", "0", "-4", "4", "0"],
    ]
    markdown = tidemark(group, "rewind", "show", str(plan["rewind_id"]), "--output", "markdown").stdout
    assert f"| {topic_of(group)} | 1 | 4 | 0 | 4 | 0 | 4 | 0 |".replace("_", r"\_") in markdown.splitlines()


def test_all_that_is_wrong_with_the_words_is_told_at_once_and_nothing_is_stored(group: Scenario) -> None:
    """The consumer, scope, target, reason and expiry are all wrong; exit status 1."""
    done = tidemark(
        group,
        "rewind", "plan", group.name + "x", "--to-datetime", "2026-10-25 02:30", "--zone", "Europe/Berlin",
        "--topic", "a b!", "--reason", "why", "--expires-in", "soon",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    for words in (
        f'did you mean "{group.name}"?',
        "occurs twice in Europe/Berlin",
        '"b!" does not name topics or partitions',
        "Say why in at least 10 characters",
        "Write 30m, 4h, or 2d",
        "5 problems; nothing was planned",
    ):
        assert words in done.stderr
    assert rewinds(group) == []


def test_rewind_that_was_applied_is_not_applied_again(group: Scenario) -> None:
    """A script may repeat the command: it reports this and exits with status 0."""
    number = str(planned(group, "--to-offset", "1")["rewind_id"])
    first = tidemark(group, "rewind", "apply", number, "--output", "json")
    group.run()
    again = tidemark(group, "rewind", "apply", number, "--output", "json")
    assert (again.returncode, again.stderr) == (0, f"rewind {number} was already applied; nothing was changed now\n")
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert positions(group) == [6, 4]


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "Traceback" not in done.stderr
    return plain(done.stderr)


def test_what_is_refused_ends_with_status_1_and_its_reason(group: Scenario) -> None:
    """An unknown rewind, a group that never ran, an expired plan. ``tests/integration/rewind`` covers the other reasons."""
    (group.folder / "consumers" / "other.yaml").write_text(group.spec_file.read_text() + "group: other\n")
    never_ran = tidemark(group, "rewind", "plan", group.name, "other", "--to-earliest", *REASON)
    assert "no group 'other' has ever run here" in refused(never_ran)
    assert rewinds(group) == []
    assert "there is no rewind 77" in refused(tidemark(group, "rewind", "apply", "77"))
    assert "there is no rewind 77" in refused(tidemark(group, "rewind", "undo", "77", *REASON))
    expired = planned(group, "--to-earliest", "--expires-in", "30m")["rewind_id"]
    group.sql("UPDATE tidemark.rewind SET expires_at = expires_at - interval '31 minutes' WHERE rewind_id = %s", expired)
    assert "expired" in refused(tidemark(group, "rewind", "apply", str(expired)))
    assert positions(group) == [6, 4]


def test_seek_moves_one_partition_in_one_step(group: Scenario) -> None:
    """It plans and applies at once, with the same archive and history as any rewind. It gives up what retention took only if asked."""
    topic = topic_of(group)
    done = tidemark(group, "seek", group.name, f"{topic}/0", "2", *REASON)
    assert (done.returncode, done.stderr) == (0, "applied rewind 1\n"), done.stderr
    assert (positions(group), rewinds(group)) == ([2, 4], [(1, "APPLIED")])
    assert group.rows("payload") == [b"a0", b"a1", b"b0", b"b1", b"b2", b"b3"]
    assert "7 is after the end" in refused(tidemark(group, "seek", group.name, f"{topic}/0", "7", *REASON)).replace("target ", "")
    assert f"The group reads {topic}:0-1." in refused(tidemark(group, "seek", group.name, f"{topic}/2", "0", *REASON))
    assert rewinds(group) == [(1, "APPLIED")]
    group.topics.trim(topic, {0: 2})
    assert "With --allow-loss" in refused(tidemark(group, "seek", group.name, f"{topic}/0", "0", *REASON))
    done = tidemark(group, "seek", group.name, f"{topic}/0", "0", "--allow-loss", *REASON, "--output", "json")
    assert json.loads(done.stdout)["groups"][0]["partitions"][0]["lost"] == [0, 2]


def test_erase_needs_the_plans_condition_and_tells_what_it_did_not_search(group: Scenario) -> None:
    """Plan, apply, show and list; apply needs the condition again."""
    done = tidemark(group, "erase", "plan", group.name, "--where", "payload = 'a1'", *REASON)
    assert done.returncode == 0, done.stderr
    assert f"1 row in {group.table}" in done.stdout
    assert "not searched: 0 records without rows" in done.stderr
    assert "  Kafka still holds 1 message in" in done.stdout
    assert "1 record or key that no replay loads again" in done.stdout
    assert b"a1" in group.rows("payload")
    refused = tidemark(group, "erase", "apply", "1", "--where", "payload = 'a2'")
    assert (refused.returncode, "Nothing was erased" in refused.stderr) == (1, True)
    applied = tidemark(group, "erase", "apply", "1", "--where", "payload = 'a1'", "--output", "json")
    assert applied.returncode == 0, applied.stderr
    assert (json.loads(applied.stdout)["state"], json.loads(applied.stdout)["sink_rows"]) == ("APPLIED", 1)
    assert b"a1" not in group.rows("payload")
    assert "erasure 1 of" in tidemark(group, "erase", "show", "1").stdout
    twice = tidemark(group, "erase", "plan", group.name, "--where", "true", "--key", "a", *REASON)
    assert (twice.returncode, "exactly one of --where, --key and --key-hex" in twice.stderr) == (2, True)
    by_key = tidemark(group, "erase", "plan", group.name, "--key-hex", "6e6f", "--output", "json", *REASON)
    assert "found 0 records of the key" in by_key.stderr
    plan = json.loads(by_key.stdout)
    assert (plan["sink_rows"], plan["suppressed"], plan["in_kafka"], plan["older_rows"]) == (0, 0, [], 0)
    assert tidemark(group, "erase", "apply", "2", "--where", "no").returncode == 1
    assert tidemark(group, "erase", "apply", "2", "--key", "no").returncode == 0
    assert "APPLIED" in tidemark(group, "erase", "list", group.name).stdout
    audit = tidemark(group, "audit", group.name)
    assert audit.returncode == 0, audit.stdout + audit.stderr
