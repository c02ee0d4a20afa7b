"""Publishes positions to Kafka under the group's name (`mirror: true`), so that Kafka's tools show them.

Best effort, after the commit: a failure is logged as a warning, and never delays or fails a commit. Nothing reads the offsets back (I7).
The next commit, the next run or `tidemark maintain`, which checks for differences, publishes offsets that were missed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemark.db import transaction
from tidemark.errors import Fenced, TidemarkError
from tidemark.kafka import groups
from tidemark.kafka.cluster import Cluster
from tidemark.kafka.groups import Commit, GroupInUse
from tidemark.offsets import store
from tidemark.offsets.store import PositionDeleted
from tidemark.records.ranges import TopicPartition
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.db import Connection

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Minimum interval between publications of a run."""
RENEW_S = 60.0
"""How often a run publishes all its positions, even unchanged ones: a late request of a partition's previous owner may have replaced
them in Kafka."""
FINISH_S = 5.0
"""How long a run waits at its end for Kafka to store the last positions."""

Positions = Callable[[], Mapping[TopicPartition, int]]


@dataclass(frozen=True, slots=True)
class Drift:
    """Published partitions, and how many of them had a different offset in Kafka, or none."""

    partitions: int
    differed: int


class Mirror:
    """Publishes a run's commits. ``positions`` returns the current positions of its partitions."""

    def __init__(self, cluster: Cluster, group: str, positions: Positions) -> None:
        self._cluster, self._group, self._positions = cluster, group, positions
        self._stored: dict[TopicPartition, int] = {}
        self._sent: Commit | None = None
        self._sent_at: float | None = None
        self._renewed_at = time.monotonic()
        self._warned = False

    def publish(self) -> None:
        """Sends positions that have changed since the last answer, and every `RENEW_S` all of them. Never waits; does nothing within
        `EVERY_S`, or while an answer is outstanding."""
        early = self._sent_at is not None and time.monotonic() - self._sent_at < EVERY_S
        if early or (self._sent is not None and not self._sent.answer.done()):
            return
        self._settle(0.0)
        if time.monotonic() - self._renewed_at >= RENEW_S:
            self._renewed_at = time.monotonic()
            self._stored.clear()
        self._send()

    def finish(self) -> None:
        """Sends the last positions and waits up to `FINISH_S` for each answer."""
        self._settle(FINISH_S)
        self._send()
        self._settle(FINISH_S)

    def _send(self) -> None:
        moved = {partition: offset for partition, offset in self._positions().items() if self._stored.get(partition) != offset}
        if not moved:
            return
        self._sent_at = time.monotonic()
        with self._warning():
            self._sent = groups.commit(self._cluster, self._group, moved)

    def _settle(self, timeout_s: float) -> None:
        sent, self._sent = self._sent, None
        if sent is not None:
            with self._warning():
                sent.wait(timeout_s)
                self._stored |= sent.offsets

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Logs an error: the first one of a run as a warning, the others, which have the same cause, for debugging."""
        try:
            yield
        except TidemarkError as error:
            log.log(logging.DEBUG if self._warned else logging.WARNING, "positions not mirrored group=%s: %s", self._group, error)
            self._warned = True


def require_free(cluster: Cluster, spec: ConsumerSpec) -> None:
    """Raises `GroupInUse` if live Kafka consumers use the name under which the spec mirrors its positions."""
    if not spec.mirror:
        return
    try:
        live = groups.members(cluster, spec.group)
    except TidemarkError as error:
        log.warning("group not examined, its positions may not be mirrored group=%s: %s", spec.group, error)
        return
    if live:
        raise GroupInUse(group=spec.group, members=live, servers=cluster.servers)


@contextlib.contextmanager
def mirrored(cluster: Cluster, spec: ConsumerSpec, positions: Positions) -> Iterator[Callable[[], None]]:
    """Yields the function to call after each batch of a run. At the end, also after an error, publishes the last positions.

    Publishes nothing if the run was fenced, because the next owner publishes its own positions, or if the group was deleted.
    """
    if not spec.mirror:
        yield lambda: None
        return
    mirror = Mirror(cluster, spec.group, positions)
    try:
        yield mirror.publish
    except (Fenced, PositionDeleted):
        raise
    except BaseException:
        mirror.finish()
        raise
    mirror.finish()


def republish(connection: Connection, cluster: Cluster, spec: ConsumerSpec) -> Drift:
    """Publishes all positions of a group, and counts the ones that differed in Kafka. Waits for the answer.

    Raises `GroupInUse`, `NotAllowed` or `BrokerUnavailable`.
    """
    with transaction(connection) as cur:
        positions = store.positions(cur, spec.group)
    uuids = {topic.name: topic.kafka_uuid for topic in cluster.topics(cluster.subscribed(spec), missing_ok=True)}
    offsets = {each.partition: each.position for each in positions if uuids.get(each.partition.topic) == each.kafka_uuid}
    if not offsets:
        return Drift(0, 0)
    before = cluster.group_offsets(spec.group, offsets)
    groups.commit(cluster, spec.group, offsets).wait()
    differed = sum(before.get(partition) != offset for partition, offset in offsets.items())
    log.info("positions mirrored group=%s partitions=%s differed=%s", spec.group, len(offsets), differed)
    return Drift(len(offsets), differed)


def republish_or_log(connection: Connection, cluster: Cluster, spec: ConsumerSpec) -> None:
    """Like `republish`, if the spec mirrors. Logs errors, which must not hide that positions have been moved."""
    _, failed = republish_all(connection, cluster, [spec])
    for error in failed.values():
        log.warning("positions not mirrored group=%s: %s", spec.group, error)


def republish_all(
    connection: Connection, cluster: Cluster, specs: Iterable[ConsumerSpec]
) -> tuple[dict[str, Drift], dict[str, TidemarkError]]:
    """Runs `republish` for each consumer that mirrors. Returns results and errors by consumer."""
    drifts, failed = {}, {}
    for spec in specs:
        if spec.mirror:
            try:
                drifts[spec.name] = republish(connection, cluster, spec)
            except TidemarkError as error:
                failed[spec.name] = error
    return drifts, failed
