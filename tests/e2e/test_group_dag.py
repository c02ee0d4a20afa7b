"""A consumer with several members in Airflow: a mapped task, with a driver and a seat for each map index."""

from __future__ import annotations

from tests.e2e.lab import BATCH
from tests.support.attempts import all_gone
from tests.support.waiting import until

from tidemark.sink.steps import Step

RECORDS = 1000


def test_member_that_is_killed_is_tried_again_in_its_seat_and_every_record_comes_once(lab):
    """Both members read, and one driver is killed in the middle. Its next try takes the seat at once, and the other member does not have to
    wait for it."""
    consumer = lab.consumer("team", partitions=2)
    numbers = [range(RECORDS), range(RECORDS, 2 * RECORDS)]
    for partition in range(2):
        consumer.produce(*numbers[partition], partition=partition)
    point = lab.points.at(Step.COMMIT, topic=consumer.name, partition=0, start=BATCH // 4)
    run = consumer.trigger()
    mark = point.reached()
    driver = lab.driver(mark.attempt_id)
    ends = [driver, *driver.children(recursive=True), mark.process]
    seat = lab.sql(
        "SELECT map_index FROM tidemark.attempt JOIN tidemark.partition_offset part USING (group_id)"
        " WHERE instance_id = dag_id || '/' || task_id || '/' || map_index AND partition = 0 AND run_id = %s",
        run.run_id,
    )[0][0]
    driver.kill()
    until(lambda: all_gone(ends), "the driver and its worker gone")
    point.release()
    assert run.wait() == "success"
    assert run.tries(map_index=seat) == ["failed", "success"]
    assert run.tries(map_index=1 - seat) == ["success"]
    assert consumer.rows() == list(range(2 * RECORDS))
    members = "SELECT count(*) FROM tidemark.group_member JOIN tidemark.consumer_group USING (group_id) WHERE name = %s"
    assert lab.sql(members, consumer.name) == [(0,)]
