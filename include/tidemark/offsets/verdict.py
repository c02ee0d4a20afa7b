"""What to think of a lag, without thresholds: decided from what happened, never from limits. Pure functions.

The idea of a verdict instead of a limit is Burrow's. Tidemark also knows runs, rewinds, pauses and lost records. docs/operating.md has the
table of cases; `tests/unit/test_verdict.py` tries each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from tidemark.offsets.window import Trend
from tidemark.text.wording import about, counted

MISSED = 2
"""A run is missed after this many times the longest time between the starts of two of the last runs. With 1, a run that is a second later
than the ones before would be missed for that second."""


class Verdict(StrEnum):
    """Worst first."""

    LOSING = "LOSING"
    """Retention has deleted records that were not read, or will before they are read."""
    STOP = "STOP"
    """Records wait, and nobody commits."""
    STALL = "STALL"
    """Runs commit, but more records wait than they read, and the lag grows."""
    UNKNOWN = "UNKNOWN"
    """The lag is not known."""
    PAUSED = "PAUSED"
    """Paused by an operator."""
    REPLAYING = "REPLAYING"
    """Reads again what a rewind went back over."""
    CATCHING_UP = "CATCHING UP"
    """More records wait than were read lately, and the lag shrinks."""
    OK = "OK"
    """Nothing waits, or not more than was read lately, or a run is due or running."""
    IDLE = "IDLE"
    """Nothing waits, and nothing is produced."""


RANK = {verdict: rank for rank, verdict in enumerate(Verdict)}
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


@dataclass(frozen=True, slots=True)
class Schedule:
    """What only Airflow knows of a consumer's DAG. ``next_run_at``: `None` if no run is scheduled. ``queued``: a run waits to start."""

    dag_id: str
    paused: bool = False
    next_run_at: datetime | None = None
    queued: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """What a verdict needs of a partition, or of all partitions of a topic or a group: their sums and extremes.

    ``sampled_at``: of the oldest sample; `None`: there is none. ``waiting``: records to read in partitions that are not paused.
    ``deleted``: records that retention has deleted before they were read. ``losing_from``, ``expires_at``: of the first unread record whose
    reading is slower than retention; see `tidemark.offsets.window.Sample.losing_from`. ``trends``: of its partitions that are not paused.
    ``replay``: records left to replay. ``never_claimed``, ``truncated``: numbers of partitions.
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
    committed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    verdict: Verdict
    why: str


def judge(facts: Facts, runs: Runs | None = None, schedule: Schedule | None = None) -> Judged:
    """The verdict, and its reason in one sentence. ``schedule``: `None` where Airflow was not asked."""
    runs = runs or Runs()
    if facts.sampled_at is None:
        return Judged(Verdict.UNKNOWN, "No sample yet.")
    return (
        _losing(facts)
        or _stop(facts, facts.sampled_at, runs, schedule)
        or _stall(facts)
        or _unknown(facts, facts.sampled_at, runs)
        or _paused(facts)
        or _replaying(facts)
        or _going(facts, runs)
    )


def _losing(facts: Facts) -> Judged | None:
    if facts.deleted:
        return Judged(Verdict.LOSING, f"Retention has deleted {counted(facts.deleted, 'record')} that {_was(facts.deleted)} not read.")
    if facts.losing_from is None or facts.expires_at is None or facts.now < facts.losing_from:
        return None
    left = (facts.expires_at - facts.now).total_seconds()
    when = f"will pass the position in {about(left)}" if left > 0 else "may pass the position at any time"
    return Judged(Verdict.LOSING, f"Retention {when}.")


def _stop(facts: Facts, sampled_at: datetime, runs: Runs, schedule: Schedule | None) -> Judged | None:
    if not facts.waiting:
        return None
    if runs.running_since is not None:
        return _hung(facts, runs, runs.running_since)
    if runs.state == "FAILED":
        text = " ".join((runs.error_text or "").split())
        fenced = "was fenced" if runs.error_kind == "fenced" else "failed"
        return Judged(Verdict.STOP, f"Attempt {runs.attempt_id} {fenced}: {runs.error_type or 'unknown error'}: {text}".rstrip(": "))
    if schedule is not None:
        return _unscheduled(schedule)
    if runs.began_at is None:
        return Judged(Verdict.STOP, "No run has begun yet.")
    if _missed(facts.now, runs):
        return Judged(Verdict.STOP, _since_last_run(facts.now, runs))
    return None


def _hung(facts: Facts, runs: Runs, since: datetime) -> Judged | None:
    """A run that has committed nothing for so long that, as far as the last runs tell, it should have ended and others begun."""
    known = [length for length in (runs.longest_run, runs.longest_pause) if length is not None]
    quiet = facts.now - max(since, facts.committed_at or since)
    if not known or quiet <= MISSED * max(known):
        return None
    longest = about(max(known).total_seconds())
    text = f"A run has committed nothing for {about(quiet.total_seconds())}; the last runs took, or began apart, at most {longest}."
    return Judged(Verdict.STOP, text)


def _unscheduled(schedule: Schedule) -> Judged | None:
    if schedule.queued:
        return None
    if schedule.paused:
        return Judged(Verdict.STOP, f"The DAG {schedule.dag_id} is paused.")
    if schedule.next_run_at is None:
        return Judged(Verdict.STOP, f"No run of the DAG {schedule.dag_id} is scheduled.")
    return None


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


def _stall(facts: Facts) -> Judged | None:
    if Trend.FALLING_BEHIND not in facts.trends or facts.replay:
        return None
    return Judged(Verdict.STALL, "Runs commit, but more records wait than they have read lately, and the lag grows.")


def _unknown(facts: Facts, sampled_at: datetime, runs: Runs) -> Judged | None:
    """A lag that is not known, or a lag of 0 that was sampled before something went wrong."""
    if facts.truncated:
        return Judged(Verdict.UNKNOWN, f"The log was truncated below the position, in {counted(facts.truncated, 'partition')}.")
    if facts.never_claimed:
        return Judged(Verdict.UNKNOWN, f"{counted(facts.never_claimed, 'partition was', 'partitions were')} never claimed.")
    if facts.waiting or facts.paused:
        return None
    if runs.state == "FAILED" and runs.running_since is None and runs.began_at is not None and sampled_at < runs.began_at:
        return Judged(Verdict.UNKNOWN, f"Attempt {runs.attempt_id} failed, and there is no sample since.")
    if _missed(facts.now, runs) and _missed_at(runs) > sampled_at:
        return Judged(Verdict.UNKNOWN, f"{_since_last_run(facts.now, runs)} There is no sample since.")
    return None


def _paused(facts: Facts) -> Judged | None:
    if not facts.paused:
        return None
    if facts.paused == facts.partitions:
        return Judged(Verdict.PAUSED, "Paused with `tidemark pause`.")
    return Judged(Verdict.PAUSED, f"{counted(facts.paused, 'partition is', 'partitions are')} paused with `tidemark pause`.")


def _replaying(facts: Facts) -> Judged | None:
    if not facts.replay:
        return None
    return Judged(Verdict.REPLAYING, f"{counted(facts.replay, 'record')} left to read again after a rewind.")


def _going(facts: Facts, runs: Runs) -> Judged:
    if Trend.CATCHING_UP in facts.trends:
        return Judged(Verdict.CATCHING_UP, "More records wait than were read lately, and the lag shrinks.")
    if not facts.waiting:
        if facts.trends == {Trend.IDLE}:
            return Judged(Verdict.IDLE, "Nothing waits, and nothing is produced.")
        return Judged(Verdict.OK, "Nothing waits.")
    if runs.running_since is not None:
        return Judged(Verdict.OK, "A run is reading.")
    if Trend.WAITING in facts.trends or Trend.KEEPING_UP not in facts.trends:
        return Judged(Verdict.OK, "Records wait for the next run.")
    return Judged(Verdict.OK, "Fewer records wait than were read lately.")


def _was(number: int) -> str:
    return "was" if number == 1 else "were"
