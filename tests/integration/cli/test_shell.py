"""What a shell offers: names are completed, `psql` opens the database, `doctor` runs in any folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario
from tests.support.shell import tidemark
from tests.support.waiting import until

from tidemark.connections import DATABASE_URL


def completed(scenario: Scenario, line: str) -> list[str]:
    """What bash offers for the last word of this line."""
    variables = {"_TIDEMARK_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    program = str(Path(sys.executable).with_name("tidemark"))
    return subprocess.run([program], env=scenario.env() | variables, capture_output=True, text=True, timeout=60).stdout.split()


def test_names_of_consumers_topics_and_rewinds_are_completed(scenario: Scenario) -> None:
    topic = scenario.feed(["a"])
    scenario.run()
    planned = tidemark(scenario, "rewind", "plan", scenario.name, "--to-earliest", "--reason", "to complete its number", "-o", "json")
    number = str(json.loads(planned.stdout)["rewind_id"])
    assert completed(scenario, f"tidemark consume {scenario.name[:3]}") == [scenario.name]
    until(lambda: completed(scenario, f"tidemark consumers new {topic[:-1]}") == [topic])  # gives up on a server after 2 s
    until(lambda: number in completed(scenario, "tidemark rewind apply "))
    scenario.topics = Topics("127.0.0.1:1")
    assert completed(scenario, f"tidemark consumers new {topic[:-1]}") == [], "nothing is offered, and nothing is printed"


def test_psql_opens_the_database_of_the_environment(scenario: Scenario) -> None:
    done = scenario.command("local", "psql", "-Atc", "SELECT current_database()")
    assert (done.returncode, done.stdout.strip()) == (0, scenario.sql("SELECT current_database()")[0][0])


def test_psql_asks_the_source_of_the_password(scenario: Scenario) -> None:
    login, _, address = scenario.database_url.rpartition("@")
    user, _, password = login.rpartition(":")
    env = scenario.env() | {DATABASE_URL: f"{user}@{address}", "TIDEMARK_DATABASE_PASSWORD_COMMAND": f"echo {password}"}
    done = scenario.command("local", "psql", "-Atc", "SELECT 1", env=env)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


def test_doctor_examines_the_servers_of_a_folder_without_consumers(scenario: Scenario, tmp_path: Path) -> None:
    done = tidemark(scenario, "doctor", "-o", "json", env={"TIDEMARK_CONSUMERS": str(tmp_path / "none")})
    subjects = {finding["subject"]: finding["level"] for finding in json.loads(done.stdout)}
    assert subjects["consumers"] == "WARNING"
    assert {"postgres", "kafka"} <= {subject.partition(":")[0] for subject in subjects}
