"""How a consumer is doing: one word, why, and what ends it. Decided from what happened, without thresholds. Pure functions.

The page, ``tidemark lag``, ``groups``, ``offsets`` and ``doctor``, the metrics and the alert rules all show what `judge` returns. That it
needs no limits is an idea of Burrow's. docs/operating.md has the table of cases; `tests/unit/test_health.py` tries each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from tidemark.offsets.window import Trend
from tidemark.text.wording import about, counted

MISSED = 2
"""A run is missed after this many times the longest time between the starts of two of the last runs. With 1, a run that is a second later
than the ones before would be missed for that second."""
TRANSACTION = timedelta(minutes=15)
"""Kafka ends a transaction after this time at the latest, unless ``transaction.max.timeout.ms`` of the brokers was raised."""


class Health(StrEnum):
    """Worst first. docs/operating.md says what each means and what ends it."""

    BAD_SPEC = "bad spec"
    UNREACHABLE = "unreachable"
    LOSING = "losing"
    RUN_FAILED = "run failed"
    STOPPED = "stopped"
    STALLED = "stalled"
    BLOCKED = "blocked"
    OBJECTIVE_MISSED = "objective missed"
    RECORDS_FAILED = "records failed"
    UNKNOWN = "unknown"
    PAUSED = "paused"
    REPLAYING = "replaying"
    CATCHING_UP = "catching up"
    RECORDS_WAIT = "records wait"
    RUNNING = "running"
    UNVALIDATED = "not validated"
    OK = "ok"
    IDLE = "idle"
    NEW = "new"


OF_THE_PAGE = frozenset({Health.BAD_SPEC, Health.UNREACHABLE})
"""What is known without the database."""
RANK = {health: rank for rank, health in enumerate(Health)}
"""0 is the worst."""


@dataclass(frozen=True, slots=True)
class Runs:
    """A group's last runs, without backfills. Several members of one Airflow run count as one run.

    ``running_since``: start of the oldest attempt that is still running. ``state``, ``error`` and so on are those of the last attempt.
    ``longest_pause`` is between the starts of two of the last runs, ``longest_run`` the length of the longest; `None`: too few runs.
    """

    attempt_id: int | None = None
    state: str | None = None
    error_kind: str | None = None
    error_type: str | None = None
    error_text: str | None = None
    began_at: datetime | None = None
    ended_at: datetime | None = None
    running_since: datetime | None = None
    longest_pause: timedelta | None = None
    longest_run: timedelta | None = None
    dag_id: str | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class Dag:
    """What only Airflow knows of a consumer's DAG. ``next_run_at``: `None` if no run is scheduled. ``queued``: a run waits to start.

    ``failed_run``, ``failed_at``: the last finished run and its end, if that run failed. ``stuck``: what blocks a run until somebody acts,
    as the end of a sentence; empty if nothing does.
    """

    dag_id: str
    paused: bool = False
    next_run_at: datetime | None = None
    queued: bool = False
    failed_run: str | None = None
    failed_at: datetime | None = None
    stuck: str = ""


@dataclass(frozen=True, slots=True)
class LagFacts:
    """What is known of the lag of a partition, or of a topic or group: sums and extremes over its partitions.

    ``sampled_at``: of the oldest sample; `None`: there is none. ``waiting``: records to read in partitions that are not paused.
    ``deleted``: records that retention has deleted before they were read. ``losing_from``, ``expires_at``: of the first unread record whose
    reading is slower than retention; see `tidemark.offsets.window.Sample.losing_from`. ``trends``: of its partitions that are not paused.
    ``replay``: records left to replay. ``never_claimed``, ``truncated``: numbers of partitions. ``open``, ``open_for``: records after the
    last stable offset, and for how long that had not moved when it was last seen. ``committed_at`` is newer than the sample during a run.
    """

    now: datetime
    sampled_at: datetime | None
    partitions: int = 1
    waiting: int = 0
    never_claimed: int = 0
    truncated: int = 0
    paused: int = 0
    deleted: int = 0
    losing_from: datetime | None = None
    expires_at: datetime | None = None
    trends: frozenset[Trend] = frozenset()
    replay: int = 0
    open: int | None = None
    open_for: timedelta | None = None
    committed_at: datetime | None = None


NEVER_RUN = LagFacts(now=datetime.max.replace(tzinfo=UTC), sampled_at=None, partitions=0)


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """What a group's ledger says beyond its lag. ``failed``, ``retrying``: failed records that are given up, and that wait for a try.

    ``blocked_by``: the validation that is critical, and before whose rows the validated view stops, or the last one. ``unvalidated``: the
    view stops before rows without a verdict. ``objectives``: how each missed objective is missed. ``pause_reason``: an operator's words.
    """

    failed: int = 0
    retrying: int = 0
    blocked_by: int | None = None
    unvalidated: bool = False
    objectives: Sequence[str] = ()
    pause_reason: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """``why`` and ``fix`` are sentences. ``fix`` says what ends it; it is empty if that needs nobody."""

    health: Health
    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class _All:
    """All facts. ``ledger`` is `None` for a topic or a partition."""

    lag: LagFacts
    runs: Runs
    dag: Dag | None
    ledger: LedgerFacts | None


def judge(facts: LagFacts, runs: Runs | None = None, dag: Dag | None = None, ledger: LedgerFacts | None = None) -> Judgement:
    """The worst that is so. ``dag``: `None` where Airflow was not asked. ``ledger``: of a group; `None` for a topic or a partition."""
    everything = _All(facts, runs or Runs(), dag, ledger)
    judged = (each(everything) for each in (*_LAG_ONLY, *_OTHERS) if facts.sampled_at is not None or each not in _LAG_ONLY)
    return min((one for one in judged if one is not None), key=lambda one: RANK[one.health])


def _losing(known: _All) -> Judgement | None:
    facts = known.lag
    if facts.deleted:
        text = f"Retention has deleted {counted(facts.deleted, 'record')} that {_was(facts.deleted)} not read."
        return Judgement(Health.LOSING, text, "Set `offset_reset`, or rewind with `--to-earliest`; the next run records what is lost.")
    if facts.losing_from is None or facts.expires_at is None or facts.now < facts.losing_from:
        return None
    left = (facts.expires_at - facts.now).total_seconds()
    when = f"will pass the position in {about(left)}" if left > 0 else "may pass the position at any time"
    return Judgement(Health.LOSING, f"Retention {when}.", "Start a run at once, or raise `retention.ms` of the topic.")


def _failed(known: _All) -> Judgement | None:
    """The last run failed: as its attempt says or, if it made none, as Airflow says."""
    runs, dag = known.runs, known.dag
    if known.ledger is None or runs.running_since is not None:
        return None
    if runs.state == "FAILED":
        return Judgement(Health.RUN_FAILED, _failure(runs), "Remove the cause; the next run goes on where this one stopped.")
    if dag is None or dag.failed_run is None or dag.failed_at is None or (runs.began_at is not None and dag.failed_at < runs.began_at):
        return None
    if (runs.dag_id, runs.run_id) != (dag.dag_id, dag.failed_run):
        why = f"The run {dag.failed_run} of the DAG {dag.dag_id} failed before it read anything."
    elif known.ledger.blocked_by is not None:
        return None  # that is why it failed
    elif known.ledger.unvalidated:
        why = (
            f"The run {dag.failed_run} of the DAG {dag.dag_id} failed before its rows had a verdict; the validated view stops before them."
        )
    else:
        why = f"The run {dag.failed_run} of the DAG {dag.dag_id} failed after it had committed and validated its records."
    return Judgement(Health.RUN_FAILED, why, "Read the log of its failed task.")


def _failure(runs: Runs) -> str:
    text = " ".join((runs.error_text or "").split())
    fenced = "was fenced" if runs.error_kind == "fenced" else "failed"
    return f"Attempt {runs.attempt_id} {fenced}: {runs.error_type or 'unknown error'}: {text}".rstrip(": ")


def _stuck(known: _All) -> Judgement | None:
    """A run of the DAG waits, and not for its turn."""
    if known.dag is None or not known.dag.stuck:
        return None
    return Judgement(
        Health.STOPPED, f"A run of the DAG {known.dag.dag_id} {known.dag.stuck}.", "Change that in Airflow, or delete the run."
    )


def _stopped(known: _All) -> Judgement | None:
    facts, runs, dag = known.lag, known.runs, known.dag
    if not facts.waiting:
        return None
    if runs.running_since is not None:
        return _hung(facts, runs, runs.running_since)
    if runs.state == "FAILED":
        return Judgement(Health.STOPPED, _failure(runs), "Remove the cause; the next run goes on where this one stopped.")
    if dag is not None:
        return _unscheduled(dag)
    if runs.began_at is None:
        return Judgement(Health.STOPPED, "Records wait, and no run has begun yet.", "Start the consumer's DAG, or `tidemark consume NAME`.")
    if _missed(facts.now, runs):
        return Judgement(Health.STOPPED, _since_last_run(facts.now, runs), "See in Airflow why no run begins.")
    return None


def _hung(facts: LagFacts, runs: Runs, since: datetime) -> Judgement | None:
    """A run that has committed nothing for so long that, as far as the last runs tell, it should have ended and others begun."""
    known = [length for length in (runs.longest_run, runs.longest_pause) if length is not None]
    quiet = facts.now - max(since, facts.committed_at or since)
    if not known or quiet <= MISSED * max(known):
        return None
    longest = about(max(known).total_seconds())
    text = f"A run has committed nothing for {about(quiet.total_seconds())}; the last runs took, or began apart, at most {longest}."
    return Judgement(Health.STOPPED, text, "Read the log of its task. It says what it waits for.")


def _unscheduled(dag: Dag) -> Judgement | None:
    if dag.queued:
        return None
    if dag.paused:
        return Judgement(Health.STOPPED, f"Records wait, and the DAG {dag.dag_id} is paused.", "Unpause it.")
    if dag.next_run_at is None:
        return Judgement(
            Health.STOPPED, f"Records wait, and no run of the DAG {dag.dag_id} is scheduled.", "Start a run, or set `schedule`."
        )
    return None


def _hanging(known: _All) -> Judgement | None:
    """Nobody can read on, because a producer has left its transaction open and the broker does not end it."""
    facts = known.lag
    if not facts.open or facts.open_for is None or facts.open_for <= TRANSACTION:
        return None
    open_for = about(facts.open_for.total_seconds())
    text = f"{counted(facts.open, 'record')} cannot be read: a transaction of a producer has been open for at least {open_for}."
    return Judgement(Health.STOPPED, text, "Find it with `kafka-transactions.sh find-hanging`, and abort it.")


def _missed(now: datetime, runs: Runs) -> bool:
    known = runs.began_at is not None and runs.longest_pause is not None
    return known and runs.running_since is None and now > _missed_at(runs)


def _missed_at(runs: Runs) -> datetime:
    assert runs.began_at is not None
    assert runs.longest_pause is not None
    return runs.began_at + MISSED * runs.longest_pause


def _since_last_run(now: datetime, runs: Runs) -> str:
    assert runs.began_at is not None
    assert runs.longest_pause is not None
    pause = about(runs.longest_pause.total_seconds())
    return f"No run has begun for {about((now - runs.began_at).total_seconds())}; the last ones began at most {pause} apart."


def _stalled(known: _All) -> Judgement | None:
    if Trend.FALLING_BEHIND not in known.lag.trends or known.lag.replay:
        return None
    text = "Runs commit, but more records wait than they have read lately, and the lag grows."
    return Judgement(Health.STALLED, text, "Run it more often, add partitions and `members`, or larger batches.")


def _blocked(known: _All) -> Judgement | None:
    if known.ledger is None or known.ledger.blocked_by is None:
        return None
    text = f"Validation {known.ledger.blocked_by} is critical; the validated view stops before its rows."
    return Judgement(Health.BLOCKED, text, "Repair the rows and run `tidemark validate NAME`, or rewind.")


def _objective_missed(known: _All) -> Judgement | None:
    if known.ledger is None or not known.ledger.objectives:
        return None
    text = "; ".join(known.ledger.objectives)
    return Judgement(
        Health.OBJECTIVE_MISSED,
        f"{text[:1].upper()}{text[1:]}.",
        "See what holds the runs up, or change `slo`; without `slo`, the DAG `maintain` ends it.",
    )


def _records_failed(known: _All) -> Judgement | None:
    if known.ledger is None or not known.ledger.failed:
        return None
    return Judgement(Health.RECORDS_FAILED, "Records have failed and are not tried again.", "Redrive, edit or discard them.")


def _unknown(known: _All) -> Judgement | None:
    """A lag that is not known, or a lag of 0 that was sampled before something went wrong."""
    facts, runs = known.lag, known.runs
    if facts.truncated:
        text = f"The log was truncated below the position, in {counted(facts.truncated, 'partition')}."
        return Judgement(Health.UNKNOWN, text, "The next run says what to do, and changes nothing.")
    if facts.never_claimed:
        text = f"{counted(facts.never_claimed, 'partition was', 'partitions were')} never claimed."
        return Judgement(Health.UNKNOWN, text, "The next run claims what it reads.")
    if facts.waiting or facts.paused or facts.sampled_at is None:
        return None
    sample = "Take one: `tidemark lag`."
    if runs.state == "FAILED" and runs.running_since is None and runs.began_at is not None and facts.sampled_at < runs.began_at:
        return Judgement(Health.UNKNOWN, f"Attempt {runs.attempt_id} failed, and there is no sample since.", sample)
    if _missed(facts.now, runs) and _missed_at(runs) > facts.sampled_at:
        return Judgement(Health.UNKNOWN, f"{_since_last_run(facts.now, runs)} There is no sample since.", sample)
    return None


def _paused(known: _All) -> Judgement | None:
    facts, ledger = known.lag, known.ledger
    reason = f" Reason: {ledger.pause_reason}" if ledger is not None and ledger.pause_reason else ""
    if facts.paused:
        some = "Paused" if facts.paused == facts.partitions else f"{counted(facts.paused, 'partition is', 'partitions are')} paused"
        return Judgement(Health.PAUSED, f"{some} with `tidemark pause`.{reason}", "`tidemark resume NAME`")
    if known.dag is not None and known.dag.paused and known.runs.attempt_id is not None:
        return Judgement(Health.PAUSED, f"The DAG {known.dag.dag_id} is paused.", "Unpause it.")
    return None


def _replaying(known: _All) -> Judgement | None:
    if not known.lag.replay:
        return None
    return Judgement(Health.REPLAYING, f"{counted(known.lag.replay, 'record')} left to read again after a rewind.")


def _catching_up(known: _All) -> Judgement | None:
    if Trend.CATCHING_UP not in known.lag.trends:
        return None
    return Judgement(Health.CATCHING_UP, "More records wait than were read lately, and the lag shrinks.")


def _retrying(known: _All) -> Judgement | None:
    if known.ledger is None or not known.ledger.retrying:
        return None
    return Judgement(Health.RECORDS_WAIT, "Records wait for their next try.")


def _running(known: _All) -> Judgement | None:
    if known.runs.running_since is None or (known.ledger is None and not known.lag.waiting):
        return None
    return Judgement(Health.RUNNING, "A run is reading.")


def _unvalidated(known: _All) -> Judgement | None:
    if known.ledger is None or not known.ledger.unvalidated:
        return None
    text = "The validated view stops before rows without a verdict; the next validation judges them."
    return Judgement(Health.UNVALIDATED, text, "Wait for the next run, or `tidemark validate NAME`.")


def _going(known: _All) -> Judgement:
    facts = known.lag
    if facts.waiting:
        few = Trend.WAITING not in facts.trends and Trend.KEEPING_UP in facts.trends
        return Judgement(Health.OK, "Fewer records wait than were read lately." if few else "Records wait for the next run.")
    if facts.open:
        return Judgement(Health.OK, f"{counted(facts.open, 'record')} of open transactions wait for their end.")
    if facts.trends == {Trend.IDLE}:
        return Judgement(Health.IDLE, "Nothing waits, and nothing is produced.")
    return Judgement(Health.OK, "Nothing waits.")


def _unsampled(known: _All) -> Judgement | None:
    if known.lag.sampled_at is not None:
        return None
    if known.runs.state == "COMMITTED" and not known.lag.partitions:
        return Judgement(Health.IDLE, "It reads no partition yet.")
    if known.runs.attempt_id is not None:
        return Judgement(Health.UNKNOWN, "The lag is unknown: there is no sample yet.", "Take one: `tidemark lag`.")
    paused = known.dag is not None and known.dag.paused
    return Judgement(Health.NEW, "It has not run yet, and its DAG is paused." if paused else "It has not run yet.", "Start its DAG.")


Rule = Callable[[_All], Judgement | None]
_LAG_ONLY: Sequence[Rule] = (_losing, _stopped, _hanging, _stalled, _unknown, _replaying, _catching_up, _going)
"""They need a sample."""
_OTHERS: Sequence[Rule] = (
    _failed,
    _stuck,
    _blocked,
    _objective_missed,
    _records_failed,
    _paused,
    _retrying,
    _running,
    _unvalidated,
    _unsampled,
)


def _was(number: int) -> str:
    return "was" if number == 1 else "were"
