"""What the tasks ``validate`` and ``publish`` do, in a consumer's DAG and in the one for drains."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from airflow.configuration import conf
from airflow.sdk import Context

from tidemark import quality
from tidemark.airflow import connections
from tidemark.airflow.lineage.facets import ValidationFacts
from tidemark.airflow.operators import ValidateOperator, spec_of
from tidemark.airflow.version_compat import AirflowFailException, AirflowSkipException
from tidemark.db import session
from tidemark.driver.call import call
from tidemark.errors import Refused
from tidemark.quality import Reaction, ValidatedRun, Verdict, reaction
from tidemark.spec import ConsumerSpec
from tidemark.text.wording import first_of

SHOWN_RANGES = 100


def validate(operator: ValidateOperator, context: Context) -> dict[str, Any]:
    """Returns the verdict, ranges and counts. Raises `AirflowFailException` if nothing may be published."""
    logging.getLogger("great_expectations").setLevel(logging.WARNING)  # it logs hundreds of lines at its start
    log, ti, spec = operator.log, context["ti"], spec_of(operator.consumer)
    run, url = ValidatedRun(ti.dag_id, ti.run_id), connections.database_url(spec)
    suites = quality.suite_files(spec)
    judge = partial(quality.validate_with_earlier, url, run, group=spec.group, suites=suites, upsert=spec.upserts)
    verdict, earlier_verdicts = call(judge, with_keeper=uses_keeper(spec)) if any(suites.values()) else judge()
    for earlier in earlier_verdicts:
        log.warning(
            "an earlier run had no verdict validation=%s verdict=%s ranges=%s",
            earlier.validation_id,
            earlier.verdict,
            earlier.ranges,
        )
    operator.validations.append(ValidationFacts(spec.table_names, verdict.results, url))
    for result in verdict.results:
        level = logging.INFO if result.success else logging.WARNING
        log.log(level, "%s %s [%s] %s", "pass" if result.success else "FAIL", result.number, result.severity, result.text)
    react = partial(reaction, validation=spec.validation, may_rewind=not operator.drains)
    if verdict.validation_id is None and react(Verdict.CRITICAL) is Reaction.REWIND:
        _require_not_rewound(spec, run)
    if (reacts := react(verdict.verdict)) is not Reaction.PUBLISH:
        failing = "; ".join(result.text for result in verdict.results if not result.success)[:2000]
        text = f"validation {verdict.validation_id} of {spec.name} is critical; nothing is published: {failing}"
        raise AirflowFailException(f"{text}. {_rewind(spec, run, verdict)}" if reacts is Reaction.REWIND else text)
    return verdict.as_json() | {"consumer": spec.name}


def announcement(verdict: dict[str, Any]) -> tuple[dict[str, Any], Sequence[int]]:
    """Returns an event's content: the consumer's unannounced verdicts, and this one, as `validate` returned it; and the verdicts' ids.
    Raises `AirflowSkipException` if they cover no rows."""
    spec = spec_of(verdict["consumer"])
    rows = quality.unannounced(connections.database_url(spec), spec.group, publishable(spec), again=verdict["validation_id"])
    if not rows.ranges:
        raise AirflowSkipException("nothing to publish: all committed rows have been announced")
    return rows.as_json(), rows.validation_ids


def shown(content: dict[str, Any]) -> str:
    """An event's content as a log line shows it, with at most `SHOWN_RANGES` of its ranges."""
    ranges = [f"{partition} [{start}, {end})" for partition, spans in content["ranges"].items() for start, end in spans]
    counts = " ".join(f"{name}={count}" for name, count in content["counts"].items())
    return f"group={content['group']} verdict={content['verdict']} ranges={first_of(ranges, SHOWN_RANGES)} {counts}"


def note_announced(consumer: str, validation_ids: Sequence[int]) -> None:
    quality.announced(connections.database_url(spec_of(consumer)), validation_ids)


def publishable(spec: ConsumerSpec) -> list[Verdict]:
    """Returns the verdicts whose rows are announced."""
    return [verdict for verdict in Verdict if reaction(verdict, spec.validation) is Reaction.PUBLISH]


def uses_keeper(spec: ConsumerSpec) -> bool:
    """Whether a keeper starts the consumer's drivers. It must outlive the task, which is impossible in a pod of the task's own."""
    return spec.spark.shared and "Kubernetes" not in conf.get("core", "executor", fallback="")


def _rewind(spec: ConsumerSpec, run: ValidatedRun, verdict: Any) -> str:
    """Rewinds the run's rows, for ``on_failure: rewind``. Returns a sentence about the result. Raises if a service is unavailable, so
    that Airflow tries again."""
    from tidemark.kafka.cluster import Cluster
    from tidemark.rewind.reaction import take_back  # a verdict is rarely critical

    resolved = connections.resolve(spec)
    with session(resolved.database_url, application="tidemark rewind") as connection:
        try:
            return f"on_failure: rewind: {take_back(connection, Cluster(resolved.kafka), spec, run, verdict)}."
        except Refused as error:
            return f"on_failure: rewind: the rewind was refused, so the rows stay: {error}"


def _require_not_rewound(spec: ConsumerSpec, run: ValidatedRun) -> None:
    """Raises if an earlier try of this validation has rewound the run's rows. Without this check the run would pass as one that wrote
    nothing."""
    from tidemark.rewind.reaction import taken_back

    with session(connections.database_url(spec)) as connection:
        rewind_id = taken_back(connection, spec.group, run)
    if rewind_id is not None:
        raise AirflowFailException(
            f"validation of this run of {spec.name} was critical, and rewind {rewind_id} took its rows out; nothing is published"
        )
