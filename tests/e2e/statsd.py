"""A StatsD server that adds up counters."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter

COUNT = re.compile(r"([^:]+):(-?\d+)\|c")


class Statsd:
    """Listens on a separate UDP port in a thread. ``counters``: the sums by name. A name ends with InfluxDB tags if it has any."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._listen, name="statsd", daemon=True)
        self._thread.start()

    @property
    def env(self) -> dict[str, str]:
        """Airflow's settings: Tidemark's metrics only, with tags."""
        return {
            "AIRFLOW__METRICS__STATSD_ON": "True",
            "AIRFLOW__METRICS__STATSD_HOST": "127.0.0.1",
            "AIRFLOW__METRICS__STATSD_PORT": str(self._socket.getsockname()[1]),
            "AIRFLOW__METRICS__STATSD_PREFIX": "airflow",
            "AIRFLOW__METRICS__STATSD_INFLUXDB_ENABLED": "True",
            "AIRFLOW__METRICS__METRICS_ALLOW_LIST": "tidemark",
        }

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while packet := self._socket.recv(65536):
            for line in packet.decode().splitlines():
                if said := COUNT.fullmatch(line):
                    self.counters[said[1]] += int(said[2])
