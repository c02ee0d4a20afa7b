"""``tidemark groups``, ``assign``, ``pause``, ``resume`` and ``flow``, as users call them."""

from __future__ import annotations

import json

import pytest
from tests.support.scenario import Scenario
from tests.support.shell import tidemark

from tidemark.cli.common import who
from tidemark.db import session
from tidemark.group.coordinator import Coordinator
from tidemark.group.requests import GroupConfig, JoinRequest
from tidemark.offsets.store import TaskIdentity

OF_MY_OWN = """
from tidemark.group.assignors import Assignor
from tidemark.records.ranges import TopicPartition


class LastTakesAll(Assignor):
    name = "last-takes-all"

    def assign(self, metadata, subscriptions):
        everything = [TopicPartition(topic, number) for topic, info in metadata.topics.items() for number in range(info.partitions)]
        return {member: everything if member == max(subscriptions) else [] for member in subscriptions}
"""


@pytest.fixture
def team(scenario: Scenario) -> Scenario:
    """A consumer with two members, whose first member has read a topic of four partitions."""
    topic = scenario.topics.create(4)
    scenario.write(topics=topic, members=2).make_sink()
    for partition in range(4):
        scenario.topics.produce(topic, ["x"], partition=partition)
    scenario.run(task=TaskIdentity(f"consume__{scenario.name}", "run", "consume", 0, 1))
    return scenario


def seated(team: Scenario, instance_id: str) -> None:
    """Lets a member join the group and wait for its assignment."""
    with session(team.database_url) as connection:
        protocols = (("range", {"topics": [team.spec.topics[0]]}),)
        Coordinator(connection, team.spec.group, GroupConfig()).join(JoinRequest("", instance_id, "cli", protocols))


def test_groups_are_listed_described_emptied_and_deleted(team: Scenario) -> None:
    group = team.spec.group
    listed = " ".join(tidemark(team, "groups", "list").stdout.split())
    assert f"{group} Empty" in listed
    assert "lag age health sampled (UTC)" in listed
    seated(team, "dag/task/7")
    found = json.loads(tidemark(team, "groups", "describe", group, "--output", "json").stdout)
    assert (found["state"], [member["instance_id"] for member in found["members"]]) == ("PreparingRebalance", ["dag/task/7"])
    assert "dag/task/7" in tidemark(team, "groups", "describe", group).stdout
    refused = tidemark(team, "groups", "delete", group)
    assert (refused.returncode, "Stop them, or remove them" in refused.stderr) == (1, True)
    wrong = tidemark(team, "groups", "remove-member", group, "dag/task/8")
    assert "Write one of dag/task/7" in wrong.stderr
    assert tidemark(team, "groups", "remove-member", group, "dag/task/7", "--reason", "its host is gone").returncode == 0
    output = json.loads(tidemark(team, "audit-log", "--group", group, "--output", "json").stdout)
    (removed,) = [one for one in output if one["kind"] == "MEMBER REMOVED"]
    assert (removed["claimed_by"], removed["reason"], removed["details"]["instance"]) == (who(), "its host is gone", "dag/task/7")
    assert json.loads(tidemark(team, "groups", "list", "--state", "Empty", "--output", "json").stdout)[0]["members"] == 0
    assert tidemark(team, "groups", "delete", group).returncode == 0
    assert f"There is no group {group}" in tidemark(team, "groups", "describe", group).stderr


def test_assign_shows_what_would_move(team: Scenario) -> None:
    """The first member has all four partitions. With two members and a sticky assignor, two partitions move."""
    output = json.loads(tidemark(team, "assign", team.name, "--with", "sticky", "--output", "json").stdout)
    seats = [f"consume__{team.name}/consume/{member}" for member in range(2)]
    assert {row["now"] for row in output["partitions"]} == {seats[0]}
    assert sorted(row["then"] for row in output["partitions"]) == [seats[0]] * 2 + [seats[1]] * 2
    assert sum(row["moves"] for row in output["partitions"]) == 2
    three = tidemark(team, "assign", team.name, "--members", "3", "--with", "cooperative-sticky").stdout
    assert "3 members with cooperative-sticky, 2 of 4 partitions move" in three
    (team.folder / "transforms" / "mine.py").write_text(OF_MY_OWN)
    output = json.loads(tidemark(team, "assign", team.name, "--with", "mine:LastTakesAll", "--output", "json").stdout)
    assert {row["then"] for row in output["partitions"]} == {seats[1]}
    unknown = tidemark(team, "assign", team.name, "--with", "stickier")
    assert (unknown.returncode, "Write one of range, roundrobin" in " ".join(unknown.stderr.split())) == (1, True)


def test_pause_resume_and_flow(team: Scenario) -> None:
    topic = team.spec.topics[0]
    assert "paused, starting with the next batch" in tidemark(team, "pause", team.name, f"{topic}:0,2-3", "--reason", "repair").stderr
    tidemark(team, "flow", team.name, "--priority", f"{topic}=5", "--max-ahead", "10m")
    found = json.loads(tidemark(team, "flow", team.name, "--output", "json").stdout)
    assert found["paused"] == [{"topic": topic, "partition": partition} for partition in (0, 2, 3)]
    assert (found["priorities"], found["max_ahead"]) == ({topic: 5}, 600.0)
    assert "still paused" in tidemark(team, "resume", team.name, f"{topic}:2").stderr
    assert tidemark(team, "resume", team.name).returncode == 0
    shown = tidemark(team, "flow", team.name, "--max-ahead", "none").stdout
    assert ["paused", "nothing"] in [line.split() for line in shown.splitlines()]
    assert ["max", "ahead", "any"] in [line.split() for line in shown.splitlines()]


def test_what_is_refused_says_what_to_write(team: Scenario) -> None:
    """Kafka is asked only about partitions without a position, so a pause works while the brokers are away."""
    topic, nobody = team.spec.topics[0], {"TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    for words, message in (
        (["pause", f"{topic}s"], f"does not read topic {topic}s. Did you mean {topic}?"),
        (["pause", f"{topic}:2-4"], f"{topic}:4 is not among the group's partitions. The group reads {topic}:0-3."),
        (["flow", "--priority", f"{topic}s=5"], f"does not read topic {topic}s. Did you mean {topic}?"),
        (["pause", "orders:3-1"], "Write 1-3 for 3-1."),
        (["pause", "or!ders"], "Write all, flights, or flights:0,1,5-9."),
        (["flow", "--priority", "orders"], "Write flights=10"),
        (["flow", "--max-ahead", "soon"], "write a number and a unit"),
    ):
        done = tidemark(team, words[0], team.name, *words[1:])
        assert (done.returncode, message in " ".join(done.stderr.split())) == (1, True), done.stderr
    assert json.loads(tidemark(team, "flow", team.name, "--output", "json").stdout)["paused"] == []
    assert tidemark(team, "pause", team.name, f"{topic}:3", env=nobody).returncode == 0


def test_topics_that_come_by_a_pattern_are_looked_up_where_they_were_not_read_yet(scenario: Scenario) -> None:
    topic = scenario.topics.create(2)
    scenario.write(topic_pattern=f"{topic}|nothing")
    done = tidemark(scenario, "pause", scenario.name, f"{topic[:-1]}x")
    assert (done.returncode, f"Did you mean {topic}? The group reads {topic}:0-1." in " ".join(done.stderr.split())) == (1, True), (
        done.stderr
    )
    assert tidemark(scenario, "pause", scenario.name, f"{topic}:1").returncode == 0
