"""Does a plan keep each Kafka partition in one task, in a task of its own?

Only then may a task commit its partition by itself. The check is a list of what is known to be harmless, walked from the result down to
the Kafka scan: what is not on it is refused, because a partition whose rows reach two tasks would be half committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidemark.errors import Refused

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ONE_TO_ONE = frozenset(
    {
        "ProjectExec",
        "FilterExec",
        "GenerateExec",
        "ExpandExec",
        "SampleExec",
        "CollectMetricsExec",
        "EventTimeWatermarkExec",
        "WholeStageCodegenExec",
        "InputAdapter",
        "ColumnarToRowExec",
        "RowToColumnarExec",
        "DeserializeToObjectExec",
        "SerializeFromObjectExec",
        "MapElementsExec",
        "MapPartitionsExec",
        "MapInPandasExec",
        "MapInArrowExec",
        "BatchEvalPythonExec",
        "ArrowEvalPythonExec",
        "BatchEvalPythonUDTFExec",
        "ArrowEvalPythonUDTFExec",
        "AdaptiveSparkPlanExec",
    }
)
"""Operators with one input whose task n makes its rows of task n's rows alone."""
BROADCAST_JOINS = frozenset({"BroadcastHashJoinExec", "BroadcastNestedLoopJoinExec"})
BROADCASTS = frozenset({"BroadcastExchangeExec", "ReusedExchangeExec", "BroadcastQueryStageExec"})


@dataclass(kw_only=True, eq=False)
class PlanNotDirect(Refused):
    """The transform moves rows between tasks."""

    operator: str
    detail: str

    def __str__(self) -> str:
        return (
            f"The transform's plan has {self.operator} ({self.detail}) between the records and the result: rows of a Kafka partition would "
            "leave their task, and could not be committed with their offset. Aggregations, windows, sorts, unions, limits, repartition and "
            "joins that shuffle are not supported yet. Make the other side of a join small enough to broadcast (functions.broadcast)."
        )


def require_direct(result: DataFrame) -> None:
    """Raises `PlanNotDirect` unless every partition of ``result`` is made of exactly one slice of the Kafka scan."""
    node = result._jdf.queryExecution().executedPlan()  # noqa: SLF001 - the plan is not in PySpark's public interface
    while True:
        name = str(node.getClass().getSimpleName())
        children = _children(node)
        if not children:
            if not _is_kafka_scan(node, name):
                raise PlanNotDirect(operator=name, detail="the records themselves must be read here, not cached, collected or other rows")
            return
        if name == "AdaptiveSparkPlanExec":
            node = node.inputPlan()
        elif name in ONE_TO_ONE and len(children) == 1:
            node = children[0]
        elif name in BROADCAST_JOINS:
            streamed = [child for child in children if not _is_broadcast(child)]
            if len(streamed) != 1:
                raise PlanNotDirect(operator=name, detail="both sides are broadcast")
            node = streamed[0]
        else:
            raise PlanNotDirect(operator=name, detail=str(node.simpleString(25))[:200])


def _is_kafka_scan(node: Any, name: str) -> bool:
    """Told by classes: in a node's text "kafka" may be a column's name, and a cached plan may have shuffled."""
    scanned = {"RowDataSourceScanExec": "relation", "BatchScanExec": "scan"}.get(name)
    return scanned is not None and str(getattr(node, scanned)().getClass().getSimpleName()) in ("KafkaRelation", "KafkaScan")


def _children(node: Any) -> list[Any]:
    found = node.children()
    return [found.apply(index) for index in range(found.size())]


def _is_broadcast(node: Any) -> bool:
    """Is this side of a join, below wrappers of code generation, a broadcast?"""
    while True:
        name = str(node.getClass().getSimpleName())
        if name in BROADCASTS:
            return True
        children = _children(node)
        if name not in ("InputAdapter", "WholeStageCodegenExec") or len(children) != 1:
            return False
        node = children[0]
