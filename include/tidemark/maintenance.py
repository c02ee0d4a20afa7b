"""Removes data after its retention: archives of rewinds and payloads of settled failed records. Discards replays beside that nobody has
swapped, ends attempts whose driver is gone, and deletes old lag history.

Removed data cannot be restored, so each run is recorded in ``tidemark.maintenance`` before anything is removed: who, when, and the
retention. `tidemark.keep` defines the allowed retentions.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

from tidemark.db import Connection, statements, transaction
from tidemark.errors import TidemarkError
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import samples, store
from tidemark.offsets.mirror import Drift, republish_all
from tidemark.offsets.sampling import sample_all
from tidemark.retry.payload_retention import empty_settled
from tidemark.rewind import beside
from tidemark.rewind.archive_retention import Removed, remove_archives
from tidemark.rewind.rows.archive import ArchiveForged
from tidemark.rewind.store import AlreadyDecided
from tidemark.spec import ConsumerSpec
from tidemark.text.duration import format_duration

log = logging.getLogger(__name__)

SQL = statements("tidemark", "maintenance.sql")


@dataclass(frozen=True, slots=True)
class Maintained:
    """The removed archives, the number of records without their payloads now, and the ended attempts."""

    removed: Sequence[Removed]
    emptied: int
    ended: Sequence[int]


def maintain(connection: Connection, keep: timedelta, *, by: str, dag_id: str | None = None, run_id: str | None = None) -> Maintained:
    """Removes data older than ``keep`` (from `tidemark.keep.parse_keep`) from a database. A killed run has removed a part, and can be
    repeated. Raises the first error of a replay beside that could not be discarded, after everything else was done."""
    with transaction(connection) as cur:
        cur.execute(SQL["begin"], {"by": by, "dag_id": dag_id, "run_id": run_id, "keep": keep})
        (maintenance_id,) = cur.fetchone() or (0,)
    refused = _discard_overdue(connection, by)
    removed = remove_archives(connection, keep)
    emptied = empty_settled(connection, keep)
    with transaction(connection) as cur:
        ended = store.end_abandoned(cur)
        samples.thin(cur)
        totals = {"archives": len(removed), "rows": sum(archive.rows for archive in removed), "payloads": emptied}
        cur.execute(SQL["end"], {**totals, "maintenance_id": maintenance_id})
    if refused:
        raise refused[0]
    return Maintained(removed, emptied, ended)


def _discard_overdue(connection: Connection, by: str) -> list[TidemarkError]:
    refused: list[TidemarkError] = []
    for rewind_id in beside.overdue(connection):
        try:
            beside.discard(connection, rewind_id, by=by, reason=f"nobody has swapped it within {format_duration(beside.KEEP)}")
        except AlreadyDecided:  # meanwhile
            continue
        except (beside.DiscardNotAllowed, ArchiveForged) as error:
            log.warning("replay beside not discarded rewind=%s: %s", rewind_id, error)
            refused.append(error)
            continue
        log.info("replay beside discarded rewind=%s", rewind_id)
    return refused


def sample_and_mirror(connection: Connection, cluster: Cluster, specs: Collection[ConsumerSpec]) -> tuple[dict[str, Drift], list[str]]:
    """Samples the lag of consumers and publishes their mirrored positions to Kafka. Returns the drifts by consumer, and the problems, which
    do not fail the maintenance."""
    unsampled = sample_all(connection, cluster, specs)
    drifts, unpublished = republish_all(connection, cluster, specs)
    problems = [f"lag not sampled: {name}: {error}" for name, error in unsampled.items()]
    return drifts, problems + [f"positions not mirrored: {name}: {error}" for name, error in unpublished.items()]
