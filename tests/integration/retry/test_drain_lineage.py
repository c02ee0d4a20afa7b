"""The lineage of a drain: it reads retry topics and writes to the consumer's table."""

from __future__ import annotations

from tests.integration.retry.lab import Lab, minutes

from tidemark.airflow.lineage import Consumed
from tidemark.airflow.openlineage import of_attempts


def test_drain_has_its_retry_topics_as_inputs(lab: Lab) -> None:
    """Their ranges are offsets of the retry topics, and only those that the drain read. The consumer's topic is not an input."""
    lab.say({"a": "retry"})
    lab.produce("a", "b")
    lab.run()
    lab.publish()
    lab.age(minutes(5))
    lab.say({})
    lab.drain()
    ((retry_topic, start, end),) = lab.sql(
        "SELECT name, start_offset, end_offset FROM tidemark.batch JOIN tidemark.topic USING (topic_id) WHERE drained"
    )
    servers = lab.consumer.connections.kafka["bootstrap.servers"]
    lineage = of_attempts([Consumed(lab.group, lab.consumer.attempt_id, (lab.table,), (), servers, lab.url)])
    assert [(one.name, one.inputFacets["tidemark_offsets"].ranges) for one in lineage.inputs] == [
        (retry_topic, [{"partition": 0, "start": start, "end": end}])
    ]
    assert retry_topic != lab.topic
    assert [(one.name.rpartition(".")[2], one.outputFacets["outputStatistics"].rowCount) for one in lineage.outputs] == [
        (lab.table.rpartition(".")[2], 1)
    ]
