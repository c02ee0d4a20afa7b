"""A consumer's health: a state, its reason and its fix. Derived from what happened, without thresholds. Pure functions.

The page, ``tidemark lag``, ``groups``, ``offsets`` and ``doctor``, the metrics and the alert rules all show the result of `judge`. Like
Burrow, it needs no thresholds. docs/operating.md has the table of cases, which `tests/unit/offsets/test_health.py` covers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from tidemark.offsets.window import Trend
from tidemark.text.wording import about, counted

MISSED = 2
"""A run is missed after this multiple of the longest interval between recent starts. With 1, a run that starts a second late would count as
missed."""
TRANSACTION = timedelta(minutes=15)
"""Kafka's default ``transaction.max.timeout.ms``: brokers abort transactions that stay open longer."""


class Health(StrEnum):
    """Worst first. docs/operating.md explains each state and its fix."""

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


PAGE_ONLY = frozenset({Health.BAD_SPEC, Health.UNREACHABLE})
"""States that the page derives without the database."""
RANK = {health: rank for rank, health in enumerate(Health)}
"""0 is the worst."""


@dataclass(frozen=True, slots=True)
class Runs:
    """A group's last runs, without backfills. Several members of one Airflow run count as one run.

    ``running_since``: start of the oldest attempt that is still running. ``state``, ``error_kind`` and so on describe the last attempt.
    ``longest_pause``: longest interval between recent starts. ``longest_run``: duration of the longest recent run. `None`: too few runs.
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
    """Airflow's facts about a consumer's DAG. ``next_run_at``: `None` if no run is scheduled. ``queued``: a run waits to start.

    ``failed_run``, ``failed_at``: the last finished run and its end, if that run failed. ``stuck``: what blocks a run until a user acts, as
    the end of a sentence; empty if nothing does.
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
    """The lag of a partition, or of a topic or group: sums and extremes over its partitions.

    ``sampled_at``: time of the oldest sample; `None` without samples. ``waiting``: records to read in partitions that are not paused.
    ``deleted``: unread records that retention has deleted. ``losing_from``, ``expires_at``: of the first unread record that retention will
    overtake; see `tidemark.offsets.window.Sample.losing_from`. ``trends``: of partitions that are not paused. ``replay``: records left to
    replay. ``never_claimed``, ``truncated``: numbers of partitions. ``open``, ``open_for``: records after the last stable offset, and how
    long that offset had not moved at the last sample. ``committed_at`` is newer than the sample during a run.
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
    """A group's ledger facts beyond its lag. ``failed``: records that will not be retried. ``retrying``: records that wait for a retry.

    ``blocked_by``: the critical validation at which the validated view stops, or the last critical one. ``unvalidated``: the view stops
    before rows without a verdict. ``objectives``: a text for each missed objective. ``pause_reason``: as entered by the operator.
    """

    failed: int = 0
    retrying: int = 0
    blocked_by: int | None = None
    unvalidated: bool = False
    objectives: Sequence[str] = ()
    pause_reason: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A health state with its reason and its fix, as sentences. ``fix`` is empty if no action is needed."""

    health: Health
    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class _Facts:
    """Input of the rules. ``ledger`` is `None` for a topic or a partition."""

    lag: LagFacts
    runs: Runs
    dag: Dag | None
    ledger: LedgerFacts | None


def judge(lag: LagFacts, runs: Runs | None = None, dag: Dag | None = None, ledger: LedgerFacts | None = None) -> Judgement:
    """Returns the worst state that applies. ``dag``: `None` without Airflow's facts. ``ledger``: `None` for a topic or a partition."""
    facts = _Facts(lag, runs or Runs(), dag, ledger)
    judgements = (rule(facts) for rule in (*_LAG_RULES, *_OTHER_RULES) if lag.sampled_at is not None or rule not in _LAG_RULES)
    return min((each for each in judgements if each is not None), key=lambda judgement: RANK[judgement.health])


def _losing(facts: _Facts) -> Judgement | None:
    lag = facts.lag
    if lag.deleted:
        text = f"Retention has deleted {counted(lag.deleted, 'record that was', 'records that were')} not read."
        return Judgement(Health.LOSING, text, "Set `offset_reset`, or rewind with `--to-earliest`; the next run records what is lost.")
    if lag.losing_from is None or lag.expires_at is None or lag.now < lag.losing_from:
        return None
    remaining_s = (lag.expires_at - lag.now).total_seconds()
    when = f"will pass the position in {about(remaining_s)}" if remaining_s > 0 else "may pass the position at any time"
    return Judgement(Health.LOSING, f"Retention {when}.", "Start a run at once, or raise `retention.ms` of the topic.")


def _failed(facts: _Facts) -> Judgement | None:
    """The last run failed, according to its attempt, or to Airflow if it had none."""
    runs, dag = facts.runs, facts.dag
    if facts.ledger is None or runs.running_since is not None:
        return None
    if runs.state == "FAILED":
        return Judgement(Health.RUN_FAILED, _failure(runs), "Fix the cause; the next run continues where this one stopped.")
    if dag is None or dag.failed_run is None or dag.failed_at is None or (runs.began_at is not None and dag.failed_at < runs.began_at):
        return None
    if (runs.dag_id, runs.run_id) != (dag.dag_id, dag.failed_run):
        why = f"The run {dag.failed_run} of the DAG {dag.dag_id} failed before it read anything."
    elif facts.ledger.blocked_by is not None:
        return None  # reported as blocked
    elif facts.ledger.unvalidated:
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


def _stuck(facts: _Facts) -> Judgement | None:
    """A run of the DAG cannot start without a user's action."""
    if facts.dag is None or not facts.dag.stuck:
        return None
    return Judgement(Health.STOPPED, f"A run of the DAG {facts.dag.dag_id} {facts.dag.stuck}.", "Fix that in Airflow, or delete the run.")


def _stopped(facts: _Facts) -> Judgement | None:
    lag, runs, dag = facts.lag, facts.runs, facts.dag
    if not lag.waiting:
        return None
    if runs.running_since is not None:
        return _hung(lag, runs, runs.running_since)
    if runs.state == "FAILED":
        return Judgement(Health.STOPPED, _failure(runs), "Fix the cause; the next run continues where this one stopped.")
    if dag is not None:
        return _unscheduled(dag)
    if runs.began_at is None:
        return Judgement(
            Health.STOPPED, "Records wait, and no run has started yet.", "Start the consumer's DAG, or `tidemark consume NAME`."
        )
    missed = _missed(runs, lag.now)
    return Judgement(Health.STOPPED, missed, "Check in Airflow why no run starts.") if missed else None


def _hung(lag: LagFacts, runs: Runs, since: datetime) -> Judgement | None:
    """A run has committed nothing for longer than recent runs and the intervals between them suggest."""
    durations = [length for length in (runs.longest_run, runs.longest_pause) if length is not None]
    quiet = lag.now - max(since, lag.committed_at or since)
    if not durations or quiet <= MISSED * max(durations):
        return None
    longest = about(max(durations).total_seconds())
    text = (
        f"A run has committed nothing for {about(quiet.total_seconds())}; recent runs, and intervals between them, took at most {longest}."
    )
    return Judgement(Health.STOPPED, text, "Read its task's log, which shows what it waits for.")


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


def _hanging(facts: _Facts) -> Judgement | None:
    """Reading is blocked: a producer has left its transaction open, and the broker does not abort it."""
    lag = facts.lag
    if not lag.open or lag.open_for is None or lag.open_for <= TRANSACTION:
        return None
    open_for = about(lag.open_for.total_seconds())
    text = f"{counted(lag.open, 'record')} cannot be read: a producer's transaction has been open for at least {open_for}."
    return Judgement(Health.STOPPED, text, "Find it with `kafka-transactions.sh find-hanging`, and abort it.")


def _missed(runs: Runs, now: datetime, since: datetime | None = None) -> str | None:
    """A sentence about a run that has been missed (later than ``since``); `None` if none has."""
    if runs.began_at is None or runs.longest_pause is None or runs.running_since is not None:
        return None
    missed_at = runs.began_at + MISSED * runs.longest_pause
    if now <= missed_at or (since is not None and missed_at <= since):
        return None
    pause = about(runs.longest_pause.total_seconds())
    return f"No run has started for {about((now - runs.began_at).total_seconds())}; recent runs started at most {pause} apart."


def _stalled(facts: _Facts) -> Judgement | None:
    if Trend.FALLING_BEHIND not in facts.lag.trends or facts.lag.replay:
        return None
    text = "Runs commit, but the lag exceeds what they read recently, and grows."
    return Judgement(Health.STALLED, text, "Run it more often, add partitions and `members`, or use larger batches.")


def _blocked(facts: _Facts) -> Judgement | None:
    if facts.ledger is None or facts.ledger.blocked_by is None:
        return None
    text = f"Validation {facts.ledger.blocked_by} is critical; the validated view stops before its rows."
    return Judgement(Health.BLOCKED, text, "Repair the rows and run `tidemark validate NAME`, or rewind.")


def _objective_missed(facts: _Facts) -> Judgement | None:
    if facts.ledger is None or not facts.ledger.objectives:
        return None
    text = "; ".join(facts.ledger.objectives)
    return Judgement(
        Health.OBJECTIVE_MISSED,
        f"{text[:1].upper()}{text[1:]}.",
        "Find what delays the runs, or change `slo`; without `slo`, the DAG `maintain` clears it.",
    )


def _records_failed(facts: _Facts) -> Judgement | None:
    if facts.ledger is None or not facts.ledger.failed:
        return None
    return Judgement(Health.RECORDS_FAILED, "Failed records will not be retried.", "Redrive, edit or discard them.")


def _unknown(facts: _Facts) -> Judgement | None:
    """The lag is unknown, or the last sample shows no lag but predates a failure."""
    lag, runs = facts.lag, facts.runs
    if lag.truncated:
        text = f"The log was truncated below the position, in {counted(lag.truncated, 'partition')}."
        return Judgement(Health.UNKNOWN, text, "The next run changes nothing and reports what to do.")
    if lag.never_claimed:
        text = f"{counted(lag.never_claimed, 'partition was', 'partitions were')} never claimed."
        return Judgement(Health.UNKNOWN, text, "The next run claims what it reads.")
    if lag.waiting or lag.paused or lag.sampled_at is None:
        return None
    sample = "Take one: `tidemark lag`."
    if runs.state == "FAILED" and runs.running_since is None and runs.began_at is not None and lag.sampled_at < runs.began_at:
        return Judgement(Health.UNKNOWN, f"Attempt {runs.attempt_id} failed, and there is no sample since.", sample)
    missed = _missed(runs, lag.now, lag.sampled_at)
    return Judgement(Health.UNKNOWN, f"{missed} There is no sample since.", sample) if missed else None


def _paused(facts: _Facts) -> Judgement | None:
    lag, ledger = facts.lag, facts.ledger
    reason = f" Reason: {ledger.pause_reason}" if ledger is not None and ledger.pause_reason else ""
    if lag.paused:
        scope = "Paused" if lag.paused == lag.partitions else f"{counted(lag.paused, 'partition is', 'partitions are')} paused"
        return Judgement(Health.PAUSED, f"{scope} with `tidemark pause`.{reason}", "`tidemark resume NAME`")
    if facts.dag is not None and facts.dag.paused and facts.runs.attempt_id is not None:
        return Judgement(Health.PAUSED, f"The DAG {facts.dag.dag_id} is paused.", "Unpause it.")
    return None


def _replaying(facts: _Facts) -> Judgement | None:
    if not facts.lag.replay:
        return None
    return Judgement(Health.REPLAYING, f"{counted(facts.lag.replay, 'record')} left to read again after a rewind.")


def _catching_up(facts: _Facts) -> Judgement | None:
    if Trend.CATCHING_UP not in facts.lag.trends:
        return None
    return Judgement(Health.CATCHING_UP, "The lag exceeds what was read recently, but shrinks.")


def _retrying(facts: _Facts) -> Judgement | None:
    if facts.ledger is None or not facts.ledger.retrying:
        return None
    return Judgement(Health.RECORDS_WAIT, "Records wait for their next try.")


def _running(facts: _Facts) -> Judgement | None:
    if facts.runs.running_since is None or (facts.ledger is None and not facts.lag.waiting):
        return None
    return Judgement(Health.RUNNING, "A run is reading.")


def _unvalidated(facts: _Facts) -> Judgement | None:
    if facts.ledger is None or not facts.ledger.unvalidated:
        return None
    text = "The validated view stops before rows without a verdict; the next validation judges them."
    return Judgement(Health.UNVALIDATED, text, "Wait for the next run, or `tidemark validate NAME`.")


def _going(facts: _Facts) -> Judgement:
    lag = facts.lag
    if lag.waiting:
        is_small = Trend.WAITING not in lag.trends and Trend.KEEPING_UP in lag.trends
        return Judgement(Health.OK, "The lag is smaller than what was read recently." if is_small else "Records wait for the next run.")
    if lag.open:
        return Judgement(Health.OK, f"{counted(lag.open, 'record')} wait for open transactions to end.")
    if lag.trends == {Trend.IDLE}:
        return Judgement(Health.IDLE, "No lag; no new records.")
    return Judgement(Health.OK, "No lag.")


def _unsampled(facts: _Facts) -> Judgement | None:
    if facts.lag.sampled_at is not None:
        return None
    if facts.runs.state == "COMMITTED" and not facts.lag.partitions:
        return Judgement(Health.IDLE, "No partition to read yet.")
    if facts.runs.attempt_id is not None:
        return Judgement(Health.UNKNOWN, "The lag is unknown: there is no sample yet.", "Take one: `tidemark lag`.")
    paused = facts.dag is not None and facts.dag.paused
    return Judgement(Health.NEW, "It has not run yet, and its DAG is paused." if paused else "It has not run yet.", "Start its DAG.")


Rule = Callable[[_Facts], Judgement | None]
_LAG_RULES: Sequence[Rule] = (_losing, _stopped, _hanging, _stalled, _unknown, _replaying, _catching_up, _going)
"""Rules that need a sample."""
_OTHER_RULES: Sequence[Rule] = (
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
