"""Lineage as OpenLineage's classes, for Airflow's provider for OpenLineage. The only module that imports it: the provider is optional.

Datasets have the names that OpenLineage's convention gives to topics and tables, so that they meet those of other producers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import attr
from airflow.providers.openlineage.extractors import OperatorLineage
from openlineage.client.event_v2 import InputDataset, OutputDataset
from openlineage.client.facet_v2 import (
    DatasetFacet,
    InputDatasetFacet,
    OutputDatasetFacet,
    data_quality_assertions_dataset,
    input_statistics_input_dataset,
    output_statistics_output_dataset,
    schema_dataset,
)

from tidemark.airflow.lineage.facets import AttemptFacts, CommittedRange, Consumed, ValidationFacts, facts, kafka_address, postgres_address
from tidemark.quality.verdict import ExpectationResult, Severity

MAX_RANGES = 1000
"""How many ranges an event lists for a topic. A partition has more than one only if it was taken from the attempt and came back."""
Lineage = OperatorLineage[Any, Any]


@attr.define
class OffsetsInputDatasetFacet(InputDatasetFacet):
    """The offsets that a run has committed, ``[start, end)``. Its key in an event is ``tidemark_offsets``."""

    group: str
    attempt: int
    ranges: list[dict[str, int]]
    omitted: int
    """How many ranges are not listed."""


@attr.define
class DeletesOutputDatasetFacet(OutputDatasetFacet):
    """How many of the rows in ``outputStatistics`` delete. Its key in an event is ``tidemark_deletes``."""

    rowCount: int


def of_attempts(attempts: Sequence[Consumed]) -> Lineage:
    """Returns topics as inputs and tables as outputs. Omits facets if the database does not answer."""
    lineage = Lineage()
    for attempt in attempts:
        attempt_facts = facts(attempt)
        lineage.inputs += _topics(attempt, attempt_facts)
        lineage.outputs += [_sink(attempt, table, attempt_facts) for table in attempt.tables]
    return lineage


def of_validations(validations: Sequence[ValidationFacts]) -> Lineage:
    """Returns the tables as inputs, with the results, which name expectations and columns, but no value of a row."""
    lineage = Lineage()
    for validation in validations:
        address, database = postgres_address(validation.database_url)
        assertions = [_assertion(result) for result in validation.results]
        facet = data_quality_assertions_dataset.DataQualityAssertionsDatasetFacet(assertions=assertions)
        names = [f"{database}.{table}" for table in validation.tables]
        facets: dict[str, InputDatasetFacet] = {"dataQualityAssertions": facet}
        lineage.inputs += [InputDataset(namespace=f"postgres://{address}", name=name, inputFacets=facets) for name in names]
    return lineage


def _topics(attempt: Consumed, attempt_facts: AttemptFacts | None) -> list[InputDataset]:
    ranges: dict[str, list[CommittedRange]] = defaultdict(list)
    for committed in attempt_facts.ranges if attempt_facts else ():
        ranges[committed.topic].append(committed)
    namespace = f"kafka://{kafka_address(attempt.bootstrap_servers)}"
    names = sorted({*attempt.topics, *ranges})
    return [
        InputDataset(namespace=namespace, name=name, inputFacets=_offsets(attempt, ranges[name]) if attempt_facts else {}) for name in names
    ]


def _offsets(attempt: Consumed, ranges: Sequence[CommittedRange]) -> dict[str, InputDatasetFacet]:
    listed = [{"partition": committed.partition, "start": committed.start, "end": committed.end} for committed in ranges[:MAX_RANGES]]
    records = sum(committed.end - committed.start for committed in ranges)
    return {
        "inputStatistics": input_statistics_input_dataset.InputStatisticsInputDatasetFacet(rowCount=records),
        "tidemark_offsets": OffsetsInputDatasetFacet(
            group=attempt.group, attempt=attempt.attempt_id, ranges=listed, omitted=len(ranges) - len(listed)
        ),
    }


def _sink(attempt: Consumed, table: str, attempt_facts: AttemptFacts | None) -> OutputDataset:
    """Returns a table. The number of its rows is only known if the attempt has no other table."""
    address, database = postgres_address(attempt.database_url)
    sink = OutputDataset(namespace=f"postgres://{address}", name=f"{database}.{table}")
    if attempt_facts:
        fields = [schema_dataset.SchemaDatasetFacetFields(name=column.name, type=column.type) for column in attempt_facts.columns[table]]
        schema: DatasetFacet = schema_dataset.SchemaDatasetFacet(fields=fields)
        sink.facets = {"schema": schema}
        if len(attempt.tables) == 1:
            written = sum(committed.sink_rows for committed in attempt_facts.ranges)
            sink.outputFacets = {"outputStatistics": output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(rowCount=written)}
            if deleted := sum(committed.deleted for committed in attempt_facts.ranges):
                sink.outputFacets["tidemark_deletes"] = DeletesOutputDatasetFacet(rowCount=deleted)
    return sink


def _assertion(result: ExpectationResult) -> data_quality_assertions_dataset.Assertion:
    return data_quality_assertions_dataset.Assertion(
        assertion=result.expectation,
        success=result.success,
        column=result.detail.get("kwargs", {}).get("column"),
        severity="error" if result.severity is Severity.CRITICAL else "warn",
    )
