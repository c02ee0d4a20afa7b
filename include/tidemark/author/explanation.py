"""Explains a consumer's file in sentences: what the consumer does, what it guarantees, and what it needs. Asks no server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tidemark.packages import DISTRIBUTION
from tidemark.profiles import Profile
from tidemark.records.outcome import ONLY
from tidemark.retry.topics import required_topics
from tidemark.sink.table import LINEAGE_NAMES, MARK
from tidemark.sink.target import MAX_REJECTED
from tidemark.spec import ConsumerSpec, OffsetReset, OnFailure, RetryOrder, RunMode, Sink
from tidemark.spec.model import Approval, Deletes, Encoding, Envelope, Evolve
from tidemark.spec.user_transform import Form
from tidemark.text.duration import format_duration
from tidemark.text.wording import counted

_ENCODINGS = {
    Encoding.BYTES: "bytes, not decoded",
    Encoding.STRING: "text in UTF-8",
    Encoding.JSON: "JSON",
    Encoding.JSON_SCHEMA: "JSON after the id of its JSON Schema",
    Encoding.AVRO: "Avro",
    Encoding.PROTOBUF: "Protobuf",
}
_FORMS = {
    Form.FUNCTION: "which gets one record at a time (function form)",
    Form.ARROW: "which gets a batch of records of one partition (Arrow form)",
    Form.SPARK: (
        "which gets a batch as a DataFrame (Spark form). If it shuffles, all partitions' rows of the batch are committed together; "
        "otherwise each partition commits on its own"
    ),
}
_STARTS = {
    None: "A partition without a position starts at its earliest record. A position that is no longer in the log is refused.",
    OffsetReset.EARLIEST: (
        "A partition without a position, or whose position is no longer in the log, starts at its earliest record. "
        "Skipped records are stored as a lost range."
    ),
    OffsetReset.LATEST: (
        "A partition without a position, or whose position is no longer in the log, starts after its last record. "
        "Skipped records are stored as a lost range."
    ),
    OffsetReset.NONE: "A partition without a position, or whose position is no longer in the log, is refused.",
}
_DELETES = {
    Deletes.REFUSE: "A record that deletes fails.",
    Deletes.HARD: "A record that deletes removes the row of its key.",
    Deletes.SOFT: f"A record that deletes sets {MARK[0]} in the row of its key.",
}
_REACTIONS = {
    OnFailure.BLOCK: "nothing is published, the rows stay, and the validated offset stops before them",
    OnFailure.REPORT: "the asset event is published anyway, with the verdict",
    OnFailure.REWIND: (
        "nothing is published, and the run is rewound once, with its rows and without an approval, so that the next run reads it again"
    ),
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """The sentences on one consumer."""

    does: tuple[str, ...]
    guarantees: tuple[str, ...]
    needs: tuple[str, ...]


def explanation_of(spec: ConsumerSpec, form: Form | None) -> Explanation:
    """``form``: that of the consumer's transform; `None` if it has none, or if its module cannot be imported."""
    does = (*_reads(spec), *_transforms(spec, form), *_writes(spec), *_runs(spec), *_shares(spec))
    guarantees = (*_commits(), *_failures(spec), *_outages(spec), *_validates(spec), *_rewinds(spec), *_watches(spec))
    needs = (*_connections(spec), *_packages(spec), *_tables(spec), *_rights(spec, form), *_topics(spec), *_files(spec))
    return Explanation(does, guarantees, needs)


# What it does


def _reads(spec: ConsumerSpec) -> Iterator[str]:
    group = f"as the group {spec.group}"
    if spec.partitions is not None:
        yield f"It reads only the partitions {spec.fixed}, {group}."
    elif spec.topic_pattern is not None:
        yield f"It reads all topics whose whole names match {spec.topic_pattern}, {group}, including those that are created later."
    else:
        yield f"It reads {_named('topic', spec.topics)}, {group}, including partitions that are added later."
    yield _STARTS[spec.offset_reset]
    yield from _formats(spec)


def _formats(spec: ConsumerSpec) -> Iterator[str]:
    for side, encoding in (("value", spec.format.value), ("key", spec.format.key)):
        schema, message = getattr(spec.format, f"{side}_schema"), getattr(spec.format, f"{side}_message")
        described = f" of the message {message}" if message else ""
        if encoding in (Encoding.AVRO, Encoding.PROTOBUF):
            described += f", with the schema in {schema}" if schema else ", with the schemas of the registry"
        yield f"{side.capitalize()}s are {_ENCODINGS[encoding]}{described}."
    if spec.format.envelope is Envelope.DEBEZIUM:
        yield "Values are Debezium's change data: their rows are loaded, replaced and deleted as in the source table."
        if spec.format.placeholder:
            yield f"The value {spec.format.placeholder}, which Debezium writes in place of a value that it does not know, fails its record."


def _transforms(spec: ConsumerSpec, form: Form | None) -> Iterator[str]:
    if spec.transform is not None:
        described = _FORMS[form] if form else "whose form is unknown, because it cannot be loaded"
        yield f"Records go through the transform {spec.transform}, {described}."
        return
    yield "It has no transform: each field of a value becomes the column of the same name."
    if spec.columns:
        yield f"Other columns get {_and(f'{column} from {path}' for column, path in spec.columns.items())}."
    if spec.drop:
        yield _sentence(f"{_named('field', spec.drop)} {'is' if len(spec.drop) == 1 else 'are'} not loaded.")
    if spec.skip_if:
        written = {path: [json.dumps(value, ensure_ascii=False) for value in values] for path, values in spec.skip_if.items()}
        conditions = (f"{path} is {_or(values)}" for path, values in written.items())
        yield f"A record is skipped if {_and(conditions)}."
    if spec.flatten is not None:
        yield f'Fields of nested records become columns, with "{spec.flatten}" between the names.'


def _writes(spec: ConsumerSpec) -> Iterator[str]:
    for name, sink in spec.sinks.items():
        rows = "Its rows" if name == ONLY else f"The rows for {name}"
        if sink.key:
            yield f"{rows} go into {sink.table}, where the last record of a key ({', '.join(sink.key)}) wins. {_DELETES[sink.deletes]}"
        else:
            yield f"{rows} are appended to {sink.table}."
        if sink.evolve is Evolve.ADD:
            yield f"A run adds columns that {sink.table} lacks."
        if sink.error_detail:
            yield f"The error text of a failed record may quote values of its rows for {sink.table}."
    if len(spec.sinks) > 1:
        yield "All tables are loaded in this order, in one transaction."


def _runs(spec: ConsumerSpec) -> Iterator[str]:
    batches = f"in batches of at most {counted(spec.batch.max_records, 'record')}"
    if spec.run is RunMode.CONTINUOUS:
        length = format_duration(spec.run_for)
        yield f"A run reads records as they arrive, {batches}, for {length} and then until the next run has taken over."
        yield f"Airflow starts a run every {length}."
        return
    yield f"A run reads what is in the topics when it starts, {batches}, then ends."
    zone = f" in the time zone {spec.timezone}" if spec.timezone else ""
    yield f'Airflow starts runs on the schedule "{spec.schedule}"{zone}.' if spec.schedule else "Airflow starts no run by itself."


def _shares(spec: ConsumerSpec) -> Iterator[str]:
    if spec.members > 1:
        yield f"{spec.members} Spark applications share the partitions by Kafka's group protocol, assigned by {_or(spec.assignment)}."
    if spec.listeners:
        yield f"{_and(spec.listeners)} {'hears' if len(spec.listeners) == 1 else 'hear'} of partitions that are assigned or revoked."
    if spec.mirror:
        yield "Its positions are also published to Kafka under the group's name. Nothing reads them back."
    conf = spec.spark.conf
    if conf:
        settings = _and(f"{name}={value}" for name, value in conf.items())
        yield f"Each run has a Spark application of its own, with {settings}."
    elif spec.spark.shared:
        yield "Small runs that Airflow starts beside their tasks share one Spark application."
    else:
        yield "Each run has a Spark application of its own."


# What it guarantees


def _commits() -> Iterator[str]:
    yield (
        "Each record is stored once: a range of a partition commits its rows, its position, its failed records and its entry in the ledger "
        "in one transaction."
    )
    yield "A run is fenced once a newer one has claimed its partitions: it then commits nothing more."


def _failures(spec: ConsumerSpec) -> Iterator[str]:
    retry = spec.retry
    if retry.delays:
        delays = ", ".join(map(format_duration, retry.delays))
        yield f"A record to be retried is tried again after {delays}, each counted from the try before. After the last one it fails."
        if retry.budget is not None:
            yield f"No retry starts later than {format_duration(retry.budget)} after the first failure."
        if retry.order is RetryOrder.KEY:
            held = counted(retry.max_held, "record")
            yield f"While a record waits, later ones with the same key wait too, at most {held} of a partition. Beyond that the run fails."
        else:
            yield "While a record waits, later records are loaded, including those with the same key."
        limit = f", at most {counted(retry.per_second, 'record')} per second" if retry.per_second is not None else ""
        yield f"The DAG drain_retries and `tidemark retries drain` try them again{limit}."
    else:
        yield "A record that cannot be loaded fails at once, without a retry."
    if retry.permanent:
        yield f"In a plain function, {_or(retry.permanent)} fails the record at once."
    yield "A failed record does not stop the others. It stays in tidemark.failed_record until somebody redrives or discards it."
    yield _failure_limit(spec)
    if retry.breaker is not None:
        least = counted(retry.breaker.minimum, "record")
        yield f"A range of at least {least} in which more than {retry.breaker.ratio:.4g} of them fail stops the run, and is not stored."


def _failure_limit(spec: ConsumerSpec) -> str:
    limit = spec.batch.max_failed_records
    if limit is None:
        return f"A run succeeds however many records fail, unless Postgres refuses more than {MAX_REJECTED:,} of one range."
    return f"A run fails if it hands more than {counted(limit, 'record')} to retry or failed. What it has committed stays."


def _outages(spec: ConsumerSpec) -> Iterator[str]:
    settings = spec.airflow
    if settings.retries:
        tries = counted(settings.retries, "more time")
        yield (
            f"If a server is down, Airflow tries a task {tries}, first after {format_duration(settings.retry_delay)}, then after longer "
            "waits. What was committed stays, and the next try continues from there."
        )
    else:
        yield "If a server is down, the task fails. What was committed stays, and the next run continues from there."
    if settings.execution_timeout is not None:
        yield f"Airflow ends a try of the task consume after {format_duration(settings.execution_timeout)}."


def _validates(spec: ConsumerSpec) -> Iterator[str]:
    yield "After each run, the task validate checks that every record that the run has read is accounted for."
    for name, suite in spec.suites.items():
        yield f"It also checks the run's rows in {spec.sinks[name].table} by the suite {suite}."
    reaction = _REACTIONS[OnFailure.BLOCK if spec.validation is None else spec.validation.on_failure]
    yield f"If a critical check fails, {reaction}. Otherwise the task publish emits the asset event of {_and(spec.table_names)}."


def _rewinds(spec: ConsumerSpec) -> Iterator[str]:
    if spec.rewind.approval is Approval.NONE:
        yield "A rewind needs no approval."
    else:
        who = "a person" if spec.rewind.own else "a person other than its requester"
        yield f"A rewind that is requested in Airflow needs the approval of {who}. `tidemark rewind apply` asks for none."
    yield f"A rewind beside replaces at most {counted(spec.rewind.max_beside_rows, 'row')}."


def _watches(spec: ConsumerSpec) -> Iterator[str]:
    if spec.slo is not None:
        lag, failed, freshness = spec.slo.lag, spec.slo.failed, spec.slo.freshness
        limits = [f"the first record that is not committed is older than {format_duration(lag)}"] if lag else []
        limits += [f"more than {counted(failed, 'failed record')} need attention"] if failed is not None else []
        limits += [f"a partition's records wait longer than {format_duration(freshness)} without a commit"] if freshness else []
        yield f"The DAG watch raises an alarm if {_or(limits)}."
    if spec.access is not None:
        edit = _and(spec.access.edit) or "nobody else"
        view = f", {_and(spec.access.view)} may see them" if spec.access.view else ""
        yield f"Administrators and {edit} may use its DAGs in Airflow{view}."


# What it needs


def _connections(spec: ConsumerSpec) -> Iterator[str]:
    ids = spec.connections
    registry = [f"{ids.registry} (the schema registry)"] if spec.format.uses_registry else []
    yield f"Airflow's connections {_and([f'{ids.postgres} (Postgres)', f'{ids.kafka} (Kafka)', f'{ids.spark} (Spark)', *registry])}."
    variables = ["TIDEMARK_DATABASE_URL", "TIDEMARK_KAFKA_CONFIG", *(["TIDEMARK_REGISTRY_CONFIG"] if registry else [])]
    yield f"Outside of Airflow, the variables {_and(variables)}."
    if spec.airflow.pool is not None:
        yield f"Airflow's pool {spec.airflow.pool}."


def _packages(spec: ConsumerSpec) -> Iterator[str]:
    yield f"The package {DISTRIBUTION}[{','.join(spec.extras)}], and Java 17 or newer, where its runs start."


def _tables(spec: ConsumerSpec) -> Iterator[str]:
    for sink in spec.sinks.values():
        mark = f", the column {MARK[0]}" if sink.deletes is Deletes.SOFT else ""
        key = f", and one on {', '.join(sink.key)}" if sink.key else ""
        yield (
            f"The table {sink.table} with the columns of its rows{mark}, the lineage columns {', '.join(LINEAGE_NAMES)}, a unique index on "
            f"these{key}. `tidemark sink ddl {spec.name}` prints its DDL."
        )


def _rights(spec: ConsumerSpec, form: Form | None) -> Iterator[str]:
    profiles = [str(Profile.RUNNER)]
    if spec.transform is not None and form in (Form.SPARK, None):
        profiles.append(f"{Profile.STAGER} (if the transform shuffles)")
    if spec.validation is not None and spec.validation.on_failure is OnFailure.REWIND:
        profiles.append(f"{Profile.REWINDER} (because a failed validation rewinds)")
    yield f"A role in Postgres with {_named('profile', profiles)}."
    for sink in spec.sinks.values():
        owned = ", as its owner or a member of the owner's role, because a run adds columns" if sink.evolve is Evolve.ADD else ""
        yield f"For this role, {_and(table_rights(sink))} on {sink.table}{owned}."
    yield f"For a role that rewinds, the profile {Profile.REWINDER}, and DELETE on {_and(spec.table_names)}."


def table_rights(sink: Sink) -> list[str]:
    """The rights on a sink's table that a run needs."""
    return ["SELECT", "INSERT", *(["UPDATE"] if sink.key else []), *(["DELETE"] if sink.deletes is Deletes.HARD else [])]


def _topics(spec: ConsumerSpec) -> Iterator[str]:
    if topics := [topic.name for topic in required_topics(spec)]:
        settings = spec.retry.topics
        replicas = "the broker's default number of replicas" if settings.replication is None else counted(settings.replication, "replica")
        created = "Each is created on first use" if settings.create else f"`tidemark retries topics {spec.name} --create` creates them"
        yield f"For retries, {_named('topic', topics)}. {created}, with {counted(settings.partitions, 'partition')} and {replicas}."
    if spec.mirror:
        yield f"The ACL READ on the group {spec.group} and on its topics, for the positions in Kafka."


def _files(spec: ConsumerSpec) -> Iterator[str]:
    modules = dict.fromkeys(name.partition(":")[0] for name in (spec.transform, *spec.listeners) if name is not None)
    if modules:
        yield _sentence(f"{_named('module', modules)}, installed or in spark_jobs/transforms.")
    suites = [f"include/expectations/{suite}.json" for suite in dict.fromkeys(spec.suites.values())]
    schemas = [f"include/schemas/{name}" for name in (spec.format.value_schema, spec.format.key_schema) if name]
    if files := [*suites, *dict.fromkeys(schemas)]:
        yield _sentence(f"{_named('file', files)}.")


def _named(what: str, names: Iterable[str]) -> str:
    listed = list(names)
    return f"the {what if len(listed) == 1 else f'{what}s'} {_and(listed)}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _and(names: Iterable[str]) -> str:
    return _listed(names, "and")


def _or(names: Iterable[str]) -> str:
    return _listed(names, "or")


def _listed(names: Iterable[str], word: str) -> str:
    *others, last = [*names] or [""]
    return f"{', '.join(others)} {word} {last}" if others else last
