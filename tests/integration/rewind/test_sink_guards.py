"""Triggers, rules and foreign keys of a user's table that affect rows taken out or put back: all rows move, or the rewind is refused."""

from __future__ import annotations

import psycopg2
import pytest
from tests.integration.rewind.lab import Lab
from tests.support.ledger import in_thread
from tests.support.waiting import until

from tidemark.rewind.guards import RowsStay
from tidemark.rewind.plan import PlanRefused
from tidemark.rewind.plan_model import Plan, RewindState, ToOffset, Undo
from tidemark.rewind.rows.archive import RowsRefused


def planned_back(lab: Lab) -> Plan:
    return lab.plan(ToOffset(20), f"{lab.topic}:0")


# ---- triggers and rules when rows are taken out


def test_what_keeps_rows_refuses_the_plan_by_its_name(lab: Lab) -> None:
    """A soft delete (BEFORE DELETE, RETURN NULL), a trigger that raises, and a rule. The plan tries to delete one row and rolls that
    back."""
    lab.read(50)
    forbids = "RAISE EXCEPTION 'rows of % stay', OLD.city;"
    for event, body, match in (
        ("BEFORE DELETE", "RETURN NULL;", "keeps"),
        ("BEFORE DELETE", forbids, r"the function lake.keeps\(\) raised an error of its own \(P0001\)\. It has the trigger keeps"),
        ("AFTER DELETE", forbids, r"the function lake.keeps\(\) raised an error of its own \(P0001\)\. It has the trigger keeps"),
    ):
        lab.trigger("keeps", event, body)
        with lab.unchanged(PlanRefused, match):
            planned_back(lab)
        lab.sql("DROP FUNCTION lake.keeps() CASCADE")
    lab.sql(f"CREATE RULE no_delete AS ON DELETE TO {lab.table} DO INSTEAD NOTHING")
    with lab.unchanged(PlanRefused, r"no_delete"):
        planned_back(lab)


@pytest.mark.parametrize(
    "body",
    [
        "IF OLD.kafka_offset % 10 = 7 THEN RETURN NULL; END IF; RETURN OLD;",
        "UPDATE {table} SET kafka_offset = kafka_offset + 99 WHERE kafka_offset = OLD.kafka_offset AND kafka_seq = 0; RETURN NULL;",
    ],
    ids=["some of them", "moves them out of the range"],
)
def test_rows_that_a_trigger_keeps_refuse_the_rewind(lab: Lab, body: str) -> None:
    """The number of rows in the range is compared with the number taken out."""
    lab.read(50)
    rewind_id = planned_back(lab).rewind_id
    lab.trigger("keeps_some", "BEFORE DELETE", body.format(table=lab.table))
    with lab.unchanged(RowsStay, "keeps_some"):
        lab.apply(rewind_id)
    lab.sql(f"DROP TRIGGER keeps_some ON {lab.table}")
    assert lab.apply(rewind_id).plan.state is RewindState.APPLIED
    lab.check()


def test_harmless_triggers_stand_in_nobodys_way(lab: Lab) -> None:
    """An audit trigger that returns OLD, one AFTER DELETE, and a disabled one."""
    lab.read(50)
    before = lab.image()
    lab.sql("CREATE TABLE lake.audit (kafka_offset bigint)")
    lab.trigger("audits", "BEFORE DELETE", "INSERT INTO lake.audit VALUES (OLD.kafka_offset); RETURN OLD;")
    lab.trigger("audits_after", "AFTER DELETE", "INSERT INTO lake.audit VALUES (OLD.kafka_offset); RETURN NULL;")
    lab.trigger("disabled", "BEFORE DELETE", "RETURN NULL;")
    lab.sql(f"ALTER TABLE {lab.table} DISABLE TRIGGER disabled")
    planned = planned_back(lab)
    assert lab.sql("SELECT count(*) FROM lake.audit") == [(0,)]
    done = lab.apply(planned.rewind_id).plan
    assert lab.sql("SELECT count(*) FROM lake.audit") == [(2 * done.groups[0].partitions[0].sink_rows,)]
    lab.undo(done.rewind_id)
    assert lab.image() == before


def test_a_trigger_that_raises_at_the_commit_refuses_the_rewind(lab: Lab) -> None:
    """Deferred triggers are fired before the commit, while their errors can still be handled."""
    lab.read(50)
    rewind_id = planned_back(lab).rewind_id
    lab.sql("CREATE FUNCTION lake.late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'too late'; END $$")
    lab.sql(
        f"CREATE CONSTRAINT TRIGGER late AFTER DELETE ON {lab.table} DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
        " EXECUTE FUNCTION lake.late()"
    )
    with lab.unchanged(RowsStay, r"the function lake.late\(\) raised an error of its own"):
        lab.apply(rewind_id)


# ---- tables that refer to the sink


def children(lab: Lab, action: str, *offsets: int) -> None:
    """Creates a table with rows that refer to the sink's rows at these offsets."""
    lineage = "kafka_topic_id, kafka_partition, kafka_offset, kafka_seq"
    lab.sql("CREATE TABLE lake.notes (note text, kafka_topic_id smallint, kafka_partition int, kafka_offset bigint, kafka_seq int)")
    lab.sql(f"ALTER TABLE lake.notes ADD CONSTRAINT of_city FOREIGN KEY ({lineage}) REFERENCES {lab.table} ({lineage}) {action}")
    refer(lab, *offsets)


def refer(lab: Lab, *offsets: int) -> None:
    for offset in offsets:
        lab.sql("INSERT INTO lake.notes VALUES ('x', %s, 0, %s, 0)", lab.topic_id, offset)


ACTIONS = ["ON DELETE CASCADE", "ON DELETE SET NULL", "ON DELETE SET DEFAULT", "ON DELETE RESTRICT", "", "DEFERRABLE INITIALLY DEFERRED"]


@pytest.mark.sampled
@pytest.mark.parametrize("action", ACTIONS)
def test_rows_that_refer_to_what_goes_refuse_plan_and_rewind_and_others_do_not_matter(lab: Lab, action: str) -> None:
    """The error names the table, the constraint and the number of rows. Otherwise they would be lost or changed silently, and an undo would
    not restore them."""
    lab.read(50)
    before = lab.image()
    children(lab, action, 5, 6)
    done = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    assert lab.sql("SELECT count(kafka_offset) FROM lake.notes") == [(2,)]
    lab.undo(done.rewind_id)
    assert lab.image() == before
    rewind_id = planned_back(lab).rewind_id
    refer(lab, 23, 24)
    with lab.unchanged(RowsStay, "of_city"):
        lab.apply(rewind_id)
    with lab.unchanged(PlanRefused, r"2 rows of lake.notes .*of_city"):
        planned_back(lab)
    assert lab.sql("SELECT count(kafka_offset) FROM lake.notes") == [(4,)]


def test_a_row_that_comes_to_refer_to_it_during_the_rewind_refuses_it(lab: Lab) -> None:
    """The row did not exist when the rewind counted, and the cascade deletes it. The rewind notices that and is rolled back."""
    lab.read(50)
    children(lab, "ON DELETE CASCADE")
    lab.trigger("slow", "BEFORE DELETE", "IF OLD.kafka_offset = 23 THEN PERFORM pg_advisory_xact_lock(17); END IF; RETURN OLD;")
    rewind_id = planned_back(lab).rewind_id
    with psycopg2.connect(lab.url) as other, other.cursor() as cur:
        cur.execute("SELECT pg_advisory_lock(17)")
        with in_thread(lambda: lab.apply(rewind_id)) as applied:
            until(lambda: lab.sql("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 17 AND NOT granted"))
            refer(lab, 48)
            cur.execute("SELECT pg_advisory_unlock(17)")
            with pytest.raises(RowsStay, match=r"lake.notes"):
                applied.result(180)
    other.close()
    assert lab.sql("SELECT count(*) FROM lake.notes") == [(1,)]
    assert lab.position() == 50


# ---- triggers when rows are put back


def test_rows_that_a_trigger_meddles_with_refuse_the_undo(lab: Lab) -> None:
    """Before or after they came back, some or all of them. The archive is intact, so the error does not blame it."""
    lab.read(50)
    planned = lab.plan(Undo(lab.rewind(ToOffset(20), f"{lab.topic}:0").rewind_id))
    changed = "dropped or changed by the trigger meddles"
    for event, body, match in (
        ("BEFORE INSERT", "IF NEW.kafka_offset = 23 THEN RETURN NULL; END IF; RETURN NEW;", f"1 of .* {changed}"),
        ("BEFORE INSERT", "IF NEW.kafka_offset < 25 THEN NEW.city := upper(NEW.city); END IF; RETURN NEW;", changed),
        ("BEFORE INSERT", "NEW.population := NULL; RETURN NEW;", changed),
        ("BEFORE INSERT", "RAISE EXCEPTION 'no more rows';", r"the function lake.meddles\(\) raised an error of its own"),
        ("AFTER INSERT", f"DELETE FROM {lab.table} WHERE kafka_offset = NEW.kafka_offset; RETURN NULL;", changed),
    ):
        lab.trigger("meddles", event, body)
        with lab.unchanged(RowsRefused, match):
            lab.apply(planned.rewind_id)
        lab.sql("DROP FUNCTION lake.meddles() CASCADE")


def test_an_insert_trigger_that_changes_nothing_lets_rows_come_back(lab: Lab) -> None:
    """Even if the table has columns whose types have no equality operator."""
    lab.sql(f"ALTER TABLE {lab.table} ADD extra json DEFAULT '{{}}', ADD place point DEFAULT '(1,2)'")
    lab.read(50)
    before = lab.image()
    done = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    lab.trigger("looks", "BEFORE INSERT", "PERFORM 1; RETURN NEW;")
    lab.undo(done.rewind_id)
    assert lab.image() == before
