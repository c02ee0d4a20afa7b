"""What differs in each column of the matrix.

Everything else is as locked in ``requirements.txt`` and as ``tidemark local`` starts it. ``make test`` tests that, on Python 3.11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

UNIT = ("tests/unit",)
RUN_THROUGH_AIRFLOW = ("tests/e2e/test_consume_dag.py::test_run_loads_every_record_once_and_ends_well",)
PLAIN_DRIVER = (
    "tests/unit/spark",
    "tests/integration/consume/test_arrow_form.py",
    "tests/integration/consume/test_runs.py",
    "tests/integration/sink/test_poison.py",
    "tests/integration/formats/test_decoding.py",
    "tests/integration/retry/test_drain.py",
    "tests/integration/spark/test_shared_spark.py",
)
SPARK = (
    "tests/unit/spark",
    "tests/integration/spark/test_plans.py",
    "tests/integration/spark/test_form.py",
    "tests/integration/spark/test_shared_spark.py",
    "tests/integration/sink/test_staged.py",
    "tests/integration/consume/test_arrow_form.py",
)
POSTGRES = (
    "tests/integration/project/test_history.py",
    "tests/integration/project/test_upgrade.py",
    "tests/integration/roles/test_grants.py",
    "tests/integration/sink/test_commit.py",
    "tests/integration/sink/test_upsert.py",
    "tests/integration/sink/test_deletes.py",
    "tests/integration/offsets/test_fence_machine.py",
    "tests/integration/rewind/test_scenarios.py",
    "tests/integration/rewind/test_undo.py",
    "tests/integration/retry/test_relay.py",
    "tests/integration/group/test_join.py",
    "tests/integration/group/test_deaths.py",
    "tests/integration/group/test_static_members.py",
    "tests/integration/quality/test_validation.py",
)
KAFKA = (
    "tests/integration/kafka/test_readers.py",
    "tests/integration/consume/test_group_runs.py",
    "tests/integration/consume/test_retention.py",
    "tests/integration/offsets/test_log_truncated.py",
    "tests/integration/offsets/test_mirror.py",
    "tests/integration/rewind/test_scenarios.py",
    "tests/integration/group/test_metadata_changes.py",
    "tests/integration/retry/test_topics.py",
    "tests/integration/retry/test_timestamps.py",
    "tests/integration/retry/test_hand_off.py",
)
PACKAGES = (
    *UNIT,
    "tests/integration/spark/test_form.py",
    "tests/integration/consume/test_arrow_form.py",
    "tests/integration/sink/test_copy.py",
    "tests/integration/values/test_without_code.py",
    "tests/integration/formats/test_registry.py",
    "tests/integration/quality",
    "tests/integration/kafka/test_readers.py",
)
SHARED = "tests/integration/spark/test_shared_spark.py"
IN_SPARK_FORM = (
    f"{SHARED}::test_whatever_is_killed_in_a_commit_the_next_attempt_loads_every_record_once[keeper-spark]",
    f"{SHARED}::test_whatever_is_killed_in_a_commit_the_next_attempt_loads_every_record_once[jvm-spark]",
    f"{SHARED}::test_transform_that_stops_spark_or_crashes_stops_nobody_elses",
    f"{SHARED}::test_runs_of_each_form_use_the_application_that_is_there[spark]",
)
WITH_ZOOKEEPER = {
    "tests/integration/offsets/test_log_truncated.py": "truncation: one broker with ZooKeeper keeps its leader epoch at a restart",
}
RETENTION = "tests/integration/consume/test_retention.py"
WITHOUT_TOPIC_IDS = dict.fromkeys(
    (
        f"{RETENTION}::test_recreated_topic_is_refused",
        f"{RETENTION}::test_recreated_topic_is_read_from_its_start_where_the_user_allowed_it",
        f"{RETENTION}::test_topic_that_is_recreated_while_a_run_goes_on_is_refused_by_its_next_batch",
        "tests/integration/retry/test_topics.py::test_a_topic_with_wrong_settings_is_not_used_until_it_is_fixed",
        f"{RETENTION}::test_topic_without_an_id_is_read_and_keeps_its_position_when_it_gets_one",
    ),
    "topics that are created again: they have no ids",
)
AIRFLOWS = ("tests/unit/airflow", "tests/unit/cli", "tests/unit/local", "tests/unit/project", "tests/unit/spec/test_hostile.py")
WITHOUT_AIRFLOW = dict.fromkeys(AIRFLOWS, "what needs Airflow")


@dataclass(frozen=True, slots=True)
class Column:
    """``packages``: requirements in place of the locked versions. ``resolution``: of all requirements of a driver, instead of the lock;
    such an environment has no Airflow. ``postgres`` and ``kafka``: the server's version. ``omitted``: tests that do not apply, with the
    reason.
    """

    tests: tuple[str, ...]
    python: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    resolution: str | None = None
    postgres: str | None = None
    kafka: str | None = None
    omitted: Mapping[str, str] = field(default_factory=dict)


COLUMNS = {
    "python-3.12": Column((*UNIT, *RUN_THROUGH_AIRFLOW), python="3.12"),
    "python-3.13": Column((*UNIT, *RUN_THROUGH_AIRFLOW), python="3.13"),
    "spark-3.5": Column(PLAIN_DRIVER, packages={"pyspark": "==3.5.*"}, omitted=dict.fromkeys(IN_SPARK_FORM, "in the Spark form")),
    "spark-4.0": Column(SPARK, packages={"pyspark": "==4.0.*"}),
    "spark-4.1": Column(SPARK, packages={"pyspark": "==4.1.*"}),
    "spark-4.3": Column(SPARK, packages={"pyspark": "==4.3.*"}),
    "postgres-15": Column(POSTGRES, postgres="15.19.0"),
    "postgres-16": Column(POSTGRES, postgres="16.14.0"),
    "postgres-17": Column(POSTGRES, postgres="17.10.0"),
    "kafka-2.7": Column(KAFKA, kafka="2.7.2", omitted=WITHOUT_TOPIC_IDS | WITH_ZOOKEEPER),
    "kafka-2.8": Column(KAFKA, kafka="2.8.2", omitted=WITH_ZOOKEEPER),
    "kafka-3.0": Column(KAFKA, kafka="3.0.2"),
    "kafka-3.9": Column(KAFKA, kafka="3.9.2"),
    "kafka-4.0": Column(KAFKA, kafka="4.0.1"),
    "lowest": Column(PACKAGES, packages={"pyspark": "==4.0.0"}, resolution="lowest-direct", omitted=WITHOUT_AIRFLOW),
    "newest": Column(PACKAGES, resolution="highest", omitted=WITHOUT_AIRFLOW),
}
