"""Checks whether a plan keeps each Kafka partition in one task, and one partition per task.

Only then may a task commit its partition on its own. The check walks from the result down to the Kafka scan and allows only operators known
to be safe. Any other operator could send a partition's rows to two tasks and half commit them, so such a batch is committed as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
"""Operators with one input whose task n uses only the rows of task n."""
BROADCAST_JOINS = frozenset({"BroadcastHashJoinExec", "BroadcastNestedLoopJoinExec"})
BROADCASTS = frozenset({"BroadcastExchangeExec", "ReusedExchangeExec", "BroadcastQueryStageExec"})


HEADERS_PLACEHOLDER = "timestampType"
"""A column of Spark's Kafka source that transforms do not get, in place of the headers."""


def why_staged(result: DataFrame) -> str | None:
    """The operator in the plan of ``result`` that may mix rows of several slices; `None` if each task works on a single slice."""
    node = result._jdf.queryExecution().executedPlan()  # noqa: SLF001 - the plan is not in PySpark's public interface
    while True:
        name = str(node.getClass().getSimpleName())
        children = _children(node)
        if not children:
            return None if _is_kafka_scan(node, name) else f"{name}: rows that are not read from Kafka by the task itself"
        if name == "AdaptiveSparkPlanExec":
            node = node.inputPlan()
        elif name in ONE_TO_ONE and len(children) == 1:
            node = children[0]
        elif name in BROADCAST_JOINS:
            streamed = [child for child in children if not _is_broadcast(child)]
            if len(streamed) != 1:
                return f"{name}: both sides are broadcast"
            node = streamed[0]
        else:
            return " ".join(str(node.simpleString(25)).split())[:200]


def partitions_of_tasks(result: DataFrame) -> list[tuple[str, int]]:
    """The Kafka partition that each task of ``result`` reads, in task order. Requires that `why_staged` returned `None`."""
    node = result._jdf.queryExecution().executedPlan()  # noqa: SLF001 - the plan is not in PySpark's public interface
    while children := _children(node):
        streamed = [child for child in children if not _is_broadcast(child)]
        node = node.inputPlan() if str(node.getClass().getSimpleName()) == "AdaptiveSparkPlanExec" else streamed[0]
    rdd = node.rdd()
    while str(rdd.getClass().getSimpleName()) != "KafkaSourceRDD":
        rdd = rdd.dependencies().head().rdd()
    partitions = [split.offsetRange().topicPartition() for split in rdd.partitions()]
    return [(str(partition.topic()), int(partition.partition())) for partition in partitions]


def passed_on(source: DataFrame, result: DataFrame, names: Sequence[str]) -> list[str]:
    """The columns that ``result`` passes on from ``source`` unchanged in every row, not recomputed."""
    before, after = _ids(source), _ids(result)
    return [name for name in names if name in before and before[name] == after.get(name)]


def reads_headers(result: DataFrame) -> bool:
    """Whether any operator above the scan uses the column `HEADERS_PLACEHOLDER`. Also true if unknown."""
    nodes = [result._jdf.queryExecution().optimizedPlan()]  # noqa: SLF001 - the plan is not in PySpark's public interface
    if any(word in str(nodes[0].toString()) for word in ("InMemoryRelation", "subquery")):
        return True
    while nodes:
        node = nodes.pop()
        children = _children(node)
        if children and any(str(attribute.name()) == HEADERS_PLACEHOLDER for attribute in _to_list(node.references().toSeq())):
            return True
        nodes += children
    return False


def hands_over_once(result: DataFrame) -> bool:
    """Whether exactly one operator in the plan passes Arrow batches to Python."""
    nodes, handovers = [result._jdf.queryExecution().executedPlan()], 0  # noqa: SLF001 - as above
    while nodes:
        node = nodes.pop()
        name = str(node.getClass().getSimpleName())
        handovers += "Arrow" in name or "Pandas" in name
        nodes += [node.inputPlan()] if name == "AdaptiveSparkPlanExec" else _children(node)
    return handovers == 1


def _ids(frame: DataFrame) -> dict[str, int]:
    """Spark's id of each column of ``frame``. Every computed column gets a new one."""
    columns = _to_list(frame._jdf.queryExecution().analyzed().output())  # noqa: SLF001 - as above
    return {str(column.name()): int(column.exprId().id()) for column in columns}


def _to_list(seq: Any) -> list[Any]:
    """The elements of a Scala ``Seq``."""
    return [seq.apply(index) for index in range(seq.size())]


def _is_kafka_scan(node: Any, name: str) -> bool:
    """Decides by class: in a node's text, "kafka" may be a column's name, and a cached plan may have shuffled."""
    attribute = {"RowDataSourceScanExec": "relation", "BatchScanExec": "scan"}.get(name)
    return attribute is not None and str(getattr(node, attribute)().getClass().getSimpleName()) in ("KafkaRelation", "KafkaScan")


def _children(node: Any) -> list[Any]:
    return _to_list(node.children())


def _is_broadcast(node: Any) -> bool:
    """Whether this side of a join is a broadcast, below the wrappers of code generation."""
    while True:
        name = str(node.getClass().getSimpleName())
        if name in BROADCASTS:
            return True
        children = _children(node)
        if name not in ("InputAdapter", "WholeStageCodegenExec") or len(children) != 1:
            return False
        node = children[0]
