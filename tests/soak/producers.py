"""Producers: one that is only idempotent, some whose transactions commit or abort at random, and doomed ones. All values are different."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException, Message, Producer

from tests.soak import doomed
from tests.soak.history import Outcome, Recorder, Source
from tidemark.driver.process import child_env

VALUES_A_PRODUCER = 10**9
TICK_S = 0.05
TRANSACTION_TIMEOUT_MS = 8_000
DOOMED_TIMEOUT_MS = 3_000
"""The broker looks for timed-out transactions every 10 s."""
CALL_S = 10.0
DOOMED_LIMIT_S = 25.0
END_LIMIT_S = 60.0
COMMIT_SHARE = 0.7
_TICKS = (1, 40)


@dataclass
class Sent:
    """Records that were sent together, until their outcome is known."""

    placed: dict[Source, tuple[list[int], list[int]]] = field(default_factory=lambda: defaultdict(lambda: ([], [])))
    waiting: dict[int, Source] = field(default_factory=dict)
    """Unacknowledged values, and where they were sent."""

    def send(self, producer: Producer, source: Source, value: int) -> bool:
        """Returns False if the producer's queue is full."""
        try:
            producer.produce(source.topic, value=str(value), partition=source.partition, on_delivery=self._delivered)
        except BufferError:
            return False
        self.waiting[value] = source
        return True

    def _delivered(self, error: Any, message: Message) -> None:
        if error is None:
            value, offset = int(message.value() or b""), message.offset()
            assert offset is not None
            source = self.waiting.pop(value, None)
            if source is not None:
                offsets, values = self.placed[source]
                offsets.append(offset)
                values.append(value)

    def record(self, recorder: Recorder, outcome: Outcome, *, unanswered: Outcome) -> None:
        for source, (offsets, values) in self.placed.items():
            recorder.placed(source, offsets, values, outcome)
        by_source: dict[Source, list[int]] = defaultdict(list)
        for value, source in self.waiting.items():
            by_source[source].append(value)
        for source, values in by_source.items():
            recorder.unplaced(source, values, unanswered)
        self.placed.clear()
        self.waiting.clear()


@dataclass
class Setting:
    """What all producers share."""

    servers: str
    sources: Sequence[Source]
    recorder: Recorder
    seed: int
    values: Iterator[int] = field(default_factory=lambda: itertools.count(VALUES_A_PRODUCER, VALUES_A_PRODUCER))
    """The first value of each further producer."""
    ending: threading.Lock = field(default_factory=threading.Lock)
    """Held while a transaction is ended and while the broker is killed. A single broker that is killed between a transaction's end and its
    markers restarts without leaders for a moment, takes the partitions for deleted and skips the markers: the transaction never ends."""

    def client(self, **settings: Any) -> Producer:
        return Producer({"bootstrap.servers": self.servers, "linger.ms": 10, "log_level": 0, "reconnect.backoff.max.ms": 500, **settings})


def idempotent(setting: Setting, rate: float, stop: threading.Event) -> None:
    """Sends ``rate`` records per second outside transactions, until ``stop`` is set."""
    random_ = random.Random(f"{setting.seed}/idempotent")
    producer = setting.client(**{"enable.idempotence": True})
    value, sent, owed = next(setting.values), Sent(), 0.0
    while not stop.wait(TICK_S):
        producer.poll(0)
        if not sent.waiting:  # all are acknowledged: this frees their memory
            sent.record(setting.recorder, Outcome.COMMITTED, unanswered=Outcome.UNKNOWN)
        owed = min(owed + rate * TICK_S, rate)
        source = random_.choice(setting.sources)
        while owed >= 1 and sent.send(producer, source, value):
            owed -= 1
            value += 1
    producer.flush(END_LIMIT_S)
    sent.record(setting.recorder, Outcome.COMMITTED, unanswered=Outcome.UNKNOWN)


class Transactional:
    """Runs one transaction after another, of random size and length, over random partitions, committed or aborted at random."""

    def __init__(self, setting: Setting, number: int, rate: float) -> None:
        self._setting = setting
        self._rate = rate
        self._random = random.Random(f"{setting.seed}/transactional/{number}")
        self._id = f"soak-{number}-{uuid.uuid4().hex[:8]}"
        self._value = next(setting.values)

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            producer = self._setting.client(**{"transactional.id": self._id, "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS})
            try:
                with self._setting.ending:
                    producer.init_transactions(CALL_S)
                while not stop.is_set():
                    self._transaction(producer, stop)
            except KafkaException:  # an outage or fencing: a new producer with this id ends the open transaction
                stop.wait(0.5)
        end_transaction(self._setting, self._id)  # as the next start of this producer would

    def _transaction(self, producer: Producer, stop: threading.Event) -> None:
        """Raises `KafkaException` if the producer can no longer be used. The transaction's outcome is recorded in any case."""
        sent, outcome = Sent(), Outcome.ABORTED  # its commit has not been requested
        try:
            producer.begin_transaction()
            sources = self._random.sample(list(self._setting.sources), self._random.randint(1, min(3, len(self._setting.sources))))
            ticks, commit, flush = self._random.randint(*_TICKS), self._random.random() < COMMIT_SHARE, self._random.random() < 0.8
            for _ in range(ticks):
                for _ in range(max(1, round(self._rate * TICK_S))):
                    self._value += sent.send(producer, self._random.choice(sources), self._value)
                producer.poll(0)
                if stop.wait(TICK_S):
                    break
            if commit:
                outcome = Outcome.UNKNOWN
                self._end(producer.commit_transaction)
                outcome = Outcome.COMMITTED
            else:
                if flush:
                    producer.flush(CALL_S)
                self._end(producer.abort_transaction)
        except KafkaException as error:
            if error.args[0].txn_requires_abort():
                self._end(producer.abort_transaction)
            else:
                raise
        finally:
            producer.poll(0)
            sent.record(self._setting.recorder, outcome, unanswered=outcome)

    def _end(self, ask: Callable[[float], None]) -> None:
        with self._setting.ending:
            _patiently(ask)


def _patiently(ask: Callable[[float], None]) -> None:
    """Repeats the request as long as librdkafka says that its error is retriable, for at most `END_LIMIT_S`."""
    deadline = time.monotonic() + END_LIMIT_S
    while True:
        try:
            ask(CALL_S)
        except KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() > deadline:
                raise
        else:
            return


def end_transaction(setting: Setting, transactional_id: str) -> None:
    """Starts a producer with that id, which aborts the transaction that its predecessor left open."""
    producer = setting.client(**{"transactional.id": transactional_id})
    _patiently(producer.init_transactions)


def live_and_die(
    setting: Setting, chance: random.Random, transactional_id: str, *, commit: bool, stop: threading.Event, pause_s: float
) -> int | None:
    """A producer in a separate process, which is killed. Returns how many records it had sent by then; None if it did not get that far."""
    first = next(setting.values)
    sources = chance.sample(list(setting.sources), min(2, len(setting.sources)))
    send = [(source, first + 1000 * number, chance.randint(1, 80)) for number, source in enumerate(sources)]
    sent = Sent(waiting={value: source for source, begin, count in send for value in range(begin, begin + count)})
    settings = {"bootstrap.servers": setting.servers, "transactional.id": transactional_id}
    settings["transaction.timeout.ms"] = str(DOOMED_TIMEOUT_MS)
    arguments = [settings, [[*source, begin, count] for source, begin, count in send], commit]
    process = subprocess.Popen(
        [sys.executable, str(Path(doomed.__file__)), json.dumps(arguments)],
        env=child_env(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        reached, output = _listen(process, "committing" if commit else "open")
        if reached:
            stop.wait(pause_s / 200 if commit else pause_s)  # a commit takes milliseconds
    finally:
        process.kill()
        rest, _ = process.communicate()
    lines = _lines(output + rest)
    for topic, partition, offset, value in lines.get("placed") or []:
        offsets, values = sent.placed[sent.waiting.pop(value)]
        assert (topic, partition) in setting.sources
        offsets.append(offset)
        values.append(value)
    unanswered = Outcome.UNKNOWN if "committing" in lines else Outcome.ABORTED
    sent.record(setting.recorder, Outcome.COMMITTED if "committed" in lines else unanswered, unanswered=unanswered)
    return sum(count for _, _, count in send) if reached else None


def _listen(process: subprocess.Popen[bytes], until: str) -> tuple[bool, bytes]:
    """Returns whether it got that far, and everything it has printed."""
    assert process.stdout is not None
    deadline = time.monotonic() + DOOMED_LIMIT_S
    output = b""
    while until not in _lines(output):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        more = os.read(process.stdout.fileno(), 65536) if ready else b""
        if not more:
            return False, output
        output += more
    return True, output


def _lines(output: bytes) -> dict[str, Any]:
    lines = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # cut off by the kill, or not yet complete
            what, more = json.loads(line)
            lines[what] = more
    return lines
