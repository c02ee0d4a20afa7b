"""A soak from its first server to its verdict.

    ① servers, topics, sinks   ② producers, consumers, watcher and faults, for the requested time   ③ faults end, then producers; no
    transaction stays open   ④ consumers are killed once more and catch up   ⑤ judge what is stored   ⑥ stop everything

A soak that is interrupted or fails goes straight to ⑥. Nothing that it started is left running.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.soak import broker, plan
from tests.soak.broker import Unfinished
from tests.soak.checker import judge
from tests.soak.consumers import CONSUMERS, HOOK, TOPICS, Consumer, Plan
from tests.soak.faults import Injector
from tests.soak.history import Recorder, Source, settled
from tests.soak.plan import Fault
from tests.soak.producers import Setting, Transactional, idempotent
from tests.soak.report import Result
from tests.soak.watch import Watcher, opened, stored
from tests.support.kafka_topics import Topics
from tidemark import migrations
from tidemark.db import session, transaction
from tidemark.local import LocalStack
from tidemark.local.processes import marked
from tidemark.quality import check_conservation

MARK = "TIDEMARK_SOAK"
"""An environment variable of every process that a soak starts."""
TRANSACTIONAL = 2
IDEMPOTENT_SHARE = 0.4
THREADS = 64
YOUNG_S = 20.0
"""The broker ends a hung transaction at most 3 s + 10 s after its producer died."""
MORE_S = 240.0
CATCH_UP_LIMIT_S = 240.0
CLOSE_LIMIT_S = 90.0
END_LIMIT_S = 20.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    """``rate``: records per second of all producers together. ``every_s``: average seconds between faults; ``patience_s``: how much longer
    the next fault may wait for progress. ``enough``: whether these faults suffice. If they do not when the time is up, the soak continues
    for up to `MORE_S`."""

    seconds: float
    seed: int
    rate: float = 2_500.0
    every_s: float = 6.0
    patience_s: float = 15.0
    consumers: tuple[str, ...] = tuple(one.name for one in CONSUMERS)
    kinds: tuple[Fault, ...] = tuple(Fault)
    enough: Callable[[Collection[Fault]], bool] = lambda _: True

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(one for one in CONSUMERS if one.name in self.consumers)


def soak(options: Options, say: Callable[[str], None]) -> Result:
    """Runs a soak in a temporary folder, which is kept if something is wrong. ``say`` gets a line for each event, from several threads.

    Raises `Unfinished` if the soak did not reach a verdict, or the error of a thread that failed.
    """
    folder = Path(tempfile.mkdtemp(prefix="tidemark-soak-"))
    folder.chmod(0o755)  # if root runs this, Postgres runs as another user
    began = time.monotonic()
    lock = threading.Lock()

    def say_when(text: str) -> None:
        with lock:
            say(f"{time.monotonic() - began:7.1f} s  {text}")

    say_when(f"seed {options.seed}, data and logs in {folder}")
    keep = True
    try:
        with LocalStack(folder).running() as stack, pytest.MonkeyPatch.context() as environment:  # drivers inherit it
            environment.setenv("TIDEMARK_STEP_HOOK", HOOK)
            environment.setenv(MARK, mark := uuid.uuid4().hex)
            environment.setenv("TIDEMARK_KEEPER_ENV", MARK)
            result = _Soak(options, folder, stack, say_when).run()
        result.left_over = _ended(mark)
        result.took_s = time.monotonic() - began
        keep = bool(result.problems())
    except KeyboardInterrupt:
        keep = False
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return result


class _Soak:
    def __init__(self, options: Options, folder: Path, stack: LocalStack, say: Callable[[str], None]) -> None:
        self._options = options
        self._stack = stack
        self._say = say
        (folder / "logs").mkdir()
        self._url = stack.env()["TIDEMARK_DATABASE_URL"]  # ①
        servers = stack.kafka.bootstrap_servers()
        migrations.migrate(self._url)
        topics = Topics(servers)
        read = {topics.create(TOPICS[topic], name=topic) for topic in sorted({topic for one in options.plans for topic in one.topics})}
        self._sources = [Source(topic, number) for topic in sorted(read) for number in range(TOPICS[topic])]
        for one in options.plans:
            one.write(folder, self._url)
        self._recorder = Recorder()
        self._setting = Setting(servers, self._sources, self._recorder, options.seed)
        self._consumers = {one.name: Consumer(one, folder, self._url, servers) for one in options.plans}
        self._watcher = Watcher(self._url, options.plans)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="soak")
        self._quit, self._faults_over, self._producing_over, self._watching_over = (threading.Event() for _ in range(4))
        self._ends: Mapping[Source, int] | None = None
        self._deadline = float("inf")
        batches, patience_s = self._watcher.batches, options.patience_s
        self._injector = Injector(stack, self._consumers, self._setting, self._pool, self._faults_over, say, batches, patience_s)

    def run(self) -> Result:
        try:
            return self._run()
        finally:
            self._stop()

    def _run(self) -> Result:
        options, injector = self._options, self._injector
        planned = plan.faults(options.seed, list(self._consumers), options.every_s, options.kinds)
        producers = [self._pool.submit(idempotent, self._setting, options.rate * IDEMPOTENT_SHARE, self._producing_over)]  # ②
        share = options.rate * (1 - IDEMPOTENT_SHARE) / TRANSACTIONAL
        for number in range(TRANSACTIONAL):
            producers.append(self._pool.submit(Transactional(self._setting, number, share).run, self._producing_over))
        consumers = [self._pool.submit(consumer.again, self._read_all_of(consumer)) for consumer in self._consumers.values()]
        watcher = self._pool.submit(self._watcher.run, self._watching_over)
        faults = self._pool.submit(injector.run, planned)
        self._wait([*producers, *consumers, watcher, faults], time.monotonic() + options.seconds)
        more = time.monotonic() + MORE_S
        while not options.enough(set(injector.happened)) and time.monotonic() < more:
            self._wait([*producers, *consumers, watcher, faults], time.monotonic() + _LOOK_S)

        self._say("the time is up: faults end")  # ③
        self._faults_over.set()
        self._finish([faults], CATCH_UP_LIMIT_S, "faults")
        self._producing_over.set()
        self._finish(producers, CATCH_UP_LIMIT_S, "producers")
        injector.end_transactions(YOUNG_S)
        self._await_none(lambda: broker.still_open(self._setting.servers, self._sources), CLOSE_LIMIT_S, "a transaction is still open")

        self._say(f"producers have ended: {self._recorder.records.total():,} records; consumers are killed once more and catch up")  # ④
        self._deadline = time.monotonic() + CATCH_UP_LIMIT_S
        self._ends = broker.ends(self._setting.servers, self._sources)
        for consumer in self._consumers.values():
            consumer.kill_all(for_good=False)
        self._finish([*consumers, *injector.begun], CATCH_UP_LIMIT_S + CLOSE_LIMIT_S, "consumers")
        behind = {
            f"{name} {source}": missing for name, one in self._consumers.items() for source, missing in one.behind(self._ends).items()
        }
        if behind:
            raise Unfinished(f"consumers did not catch up within {CATCH_UP_LIMIT_S} s; offsets that are missing: {behind}")
        self._watching_over.set()
        self._finish([watcher], CLOSE_LIMIT_S, "watcher")
        return self._judged()  # ⑤

    def _read_all_of(self, consumer: Consumer) -> Callable[[], bool]:
        """Returns a function that says whether the consumer has nothing more to do."""

        def done() -> bool:
            if self._quit.is_set() or time.monotonic() > self._deadline:
                return True
            return self._ends is not None and not consumer.behind(self._ends)

        return done

    def _judged(self) -> Result:
        self._say("everything is read: the checker looks at what is stored")
        result = Result(self._options.seed, self._options.seconds, self._options.rate)
        contradictions: list[str] = []
        logs = {}
        for source in self._sources:
            logs[source], problems = settled(self._recorder.log(source), *broker.read_all(self._setting.servers, source))
            contradictions += [f"{source}: {problem}" for problem in problems]
        anomalies = list(self._watcher.anomalies)
        with opened(self._url) as connection:
            self._watcher.look(connection)
            with connection, connection.cursor() as cursor:
                for one in self._options.plans:
                    for where, tables in stored(cursor, one):
                        anomalies += judge(where, logs[where.source], tables)
                        result.rows += len(tables.row_offsets)
                        result.rejected += len(tables.reject_offsets)
                        result.batches += len(tables.ledger)
        with session(self._url) as connection, transaction(connection) as cursor:
            result.not_conserved = [
                f"{one.name}: {violation}" for one in self._options.plans for violation in check_conservation(cursor, one.name, [one.table])
            ]
        result.anomalies, result.contradictions = anomalies, contradictions
        result.records = dict(self._recorder.records)
        result.snapshots = self._watcher.snapshots
        result.faults, result.missed = dict(self._injector.happened), dict(self._injector.missed)
        result.at_step = dict(self._injector.at_step)
        result.attempts = sum((consumer.attempts for consumer in self._consumers.values()), Counter())
        result.messages = {kind: text for consumer in self._consumers.values() for kind, text in consumer.messages.items()}
        return result

    # ---- waiting

    def _wait(self, futures: Sequence[Future[Any]], until: float) -> None:
        """Waits until the given time. Raises the error of a future that fails."""
        reported_at = time.monotonic()
        while (left := until - time.monotonic()) > 0:
            done, _ = wait(futures, min(left, _LOOK_S), return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            if done:
                raise Unfinished("a part of the soak ended before its time")
            if time.monotonic() - reported_at > 30:
                reported_at = time.monotonic()
                self._say(f"{self._recorder.records.total():,} records, {self._watcher.snapshots} snapshots, {left:.0f} s to go")

    def _finish(self, futures: Sequence[Future[Any]], limit_s: float, what: str) -> None:
        done, not_done = wait(futures, limit_s, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        if not_done:
            raise Unfinished(f"{what} did not end within {limit_s} s")

    def _await_none(self, ask: Callable[[], list[str]], limit_s: float, problem: str) -> None:
        deadline = time.monotonic() + limit_s
        while left := ask():
            if time.monotonic() > deadline:
                raise Unfinished(f"{problem} after {limit_s} s: {left}")
            self._quit.wait(_LOOK_S)

    def _stop(self) -> None:  # ⑥
        for event in (self._quit, self._faults_over, self._producing_over, self._watching_over):
            event.set()
        for consumer in self._consumers.values():
            consumer.kill_all(for_good=True)
        self._injector.resume_all()
        self._pool.shutdown()


def _ended(mark: str) -> list[str]:
    """Kills the processes of this soak that are still running some time after its end, and returns them."""
    deadline = time.monotonic() + END_LIMIT_S
    while (left := marked(MARK, mark)) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=_LOOK_S)
    texts = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            texts.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            process.kill()
    return texts
