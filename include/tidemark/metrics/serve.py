"""The metrics process: samples the end offsets of topics periodically, and answers scrapes from Postgres."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tidemark.db import DatabaseUrl, session, transaction
from tidemark.errors import BadInput, TidemarkError
from tidemark.metrics.families import PARTITIONS, of_lag, of_state, of_work
from tidemark.metrics.ledger import LedgerTotals
from tidemark.offsets import lag

log = logging.getLogger(__name__)


class PostgresCollector(Collector):
    """Reads all metrics for each scrape, in one transaction. Scrapes wait for each other."""

    def __init__(self, database_url: DatabaseUrl) -> None:
        self._url = database_url
        self._ledger = LedgerTotals()
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("tidemark_up", "Whether the database answered this scrape.")
        try:
            metrics = self._read()
        except TidemarkError as error:
            log.warning("database not read error=%s", error)
            metrics = []
        up.add_metric([], float(bool(metrics)))
        yield from (up, *metrics)

    def _read(self) -> list[Metric]:
        with self._lock, session(self._url, application="tidemark metrics") as connection, transaction(connection) as cur:
            self._ledger.read(cur)
            return [*of_lag(lag.everything(cur, PARTITIONS)), *of_work(self._ledger.totals), *of_state(cur)]


def serve(
    database_url: DatabaseUrl, host: str, port: int, every: timedelta, sample: Callable[[], None], ready: Callable[[int], None]
) -> None:
    """Answers scrapes until SIGTERM or SIGINT, and calls ``sample`` at the interval ``every``. Call it in the main thread.

    ``ready`` gets the port once the server answers: ``port``, or a free one if that is 0. Logs outages of Kafka or Postgres and continues.
    Raises `BadInput` if the address cannot be used.
    """
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    registry = CollectorRegistry()
    registry.register(PostgresCollector(database_url))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        fix = "Choose another with --host and --port."
        raise BadInput(what=f"{host}:{port}", found=f"the address cannot be used: {error.strerror or error}", fix=fix) from None
    previous_handlers = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ready(server.server_port)
        while True:
            try:
                sample()
            except TidemarkError as error:
                log.warning("ends not sampled error=%s", error)
            if ended.wait(every.total_seconds()):
                return
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
