"""A StatsD server that adds up counters."""

from __future__ import annotations

import re
import socketserver
import threading
from collections import Counter

COUNT = re.compile(r"([^:]+):(-?\d+)\|c")


class Statsd(socketserver.UDPServer):
    """Listens on a separate port in a thread. ``counters``: the sums by name. A name ends with InfluxDB tags if it has any."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Packet)
        self.counters: Counter[str] = Counter()
        threading.Thread(target=self.serve_forever, name="statsd", daemon=True).start()

    @property
    def env(self) -> dict[str, str]:
        """Airflow's settings: Tidemark's metrics only, with tags."""
        return {
            "AIRFLOW__METRICS__STATSD_ON": "True",
            "AIRFLOW__METRICS__STATSD_HOST": "127.0.0.1",
            "AIRFLOW__METRICS__STATSD_PORT": str(self.server_address[1]),
            "AIRFLOW__METRICS__STATSD_PREFIX": "airflow",
            "AIRFLOW__METRICS__STATSD_INFLUXDB_ENABLED": "True",
            "AIRFLOW__METRICS__METRICS_ALLOW_LIST": "tidemark",
        }

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Packet(socketserver.BaseRequestHandler):
    server: Statsd

    def handle(self) -> None:
        for line in self.request[0].decode().splitlines():
            if said := COUNT.fullmatch(line):
                self.server.counters[said[1]] += int(said[2])
