"""Tidemark's Airflow layer: DAGs from consumers' files, and operators that each call one library function.

One file in the ``dags/`` folder of any Airflow from 3.1 on is enough::

    from tidemark.airflow import all_dags

    globals().update(all_dags())

The names below are public; each is imported when it is first used. A file of its own for each factory, as in Tidemark's own ``dags/``,
lets Airflow parse less before each task, and `refuse_broken_files` in a further file shows the problems of consumers' files as an import
error on Airflow's home page. The operators are for DAGs that you write yourself: ``ConsumeOperator(task_id="load", consumer="cities")``.

The code runs in three places. DAG files call the factories, which import nothing heavy and read neither Kafka nor Postgres. Operators run
in a task. The driver runs in its own process group, which never outlives the task, or on a cluster.

Modules::

    access         the roles of consumers' files as the access of DAGs
    approvals      the DAGs with a form: their builder, the check of their input, approvals
    connections    Airflow's connections as Tidemark's settings
    dags           a DAG from each consumer's file, and the DAGs for all consumers
    lineage        reports of runs and validations: to OpenLineage, to Airflow's statistics
    operators      the tasks consume, validate and publish
    plugin         the page as an Airflow plugin
    tasks          what the tasks of the DAGs do
    triggers       what starts drains when records are due, and wakes tasks whose driver is on a cluster
    version_compat the differences between versions of Airflow
    web            the page
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from airflow import __version__

from tidemark.errors import Refused

if TYPE_CHECKING:
    from airflow.sdk import DAG

    from tidemark.airflow.dags.consume import consume_dags, refuse_broken_files
    from tidemark.airflow.dags.discard import discard_dags
    from tidemark.airflow.dags.maintain import maintain_dag
    from tidemark.airflow.dags.redrive import redrive_dags
    from tidemark.airflow.dags.retries import drain_dag
    from tidemark.airflow.dags.rewind import rewind_dags
    from tidemark.airflow.dags.watch import watch_dags
    from tidemark.airflow.operators import ConsumeOperator, PublishOperator, ValidateOperator

__all__ = [
    "ConsumeOperator",
    "PublishOperator",
    "ValidateOperator",
    "all_dags",
    "consume_dags",
    "discard_dags",
    "drain_dag",
    "maintain_dag",
    "redrive_dags",
    "refuse_broken_files",
    "rewind_dags",
    "watch_dags",
]

_HOMES = {
    "ConsumeOperator": "operators",
    "PublishOperator": "operators",
    "ValidateOperator": "operators",
    "consume_dags": "dags.consume",
    "discard_dags": "dags.discard",
    "drain_dag": "dags.retries",
    "maintain_dag": "dags.maintain",
    "redrive_dags": "dags.redrive",
    "refuse_broken_files": "dags.consume",
    "rewind_dags": "dags.rewind",
    "watch_dags": "dags.watch",
}


class AirflowTooOld(Refused):
    """This Airflow cannot run Tidemark's DAGs."""

    version: str

    def __str__(self) -> str:
        return f"This is Airflow {self.version}, whose tasks cannot ask a person for an approval. Tidemark needs Airflow 3.1 or newer."


def _require_supported(version: str) -> None:
    if version.startswith(("2.", "3.0.")):
        raise AirflowTooOld(version=version)


_require_supported(__version__)


def all_dags() -> dict[str, DAG]:
    """Every DAG of the project by its id: ``consume__<consumer>`` for each consumer's file, ``drain_retries``, ``maintain``,
    ``discard``, ``redrive`` and ``rewind``, and ``discard__<consumer>``, ``redrive__<consumer>`` and ``rewind__<consumer>`` for each
    consumer with ``access``; ``watch`` if a consumer has ``slo``. A consumer's file with problems gets a DAG that lists them and whose runs
    fail with them."""
    several = [built for name in ("consume", "discard", "redrive", "rewind", "watch") for built in _load(f"{name}_dags")().values()]
    return {dag.dag_id: dag for dag in (*several, _load("drain_dag")(), _load("maintain_dag")())}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _load(name)


def _load(name: str) -> Any:
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
