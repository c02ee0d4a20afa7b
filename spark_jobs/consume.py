"""The driver of one run of a consumer, started by the command line, Airflow or spark-submit.

    python spark_jobs/consume.py NAME
    spark-submit spark_jobs/consume.py NAME          # client mode, and cluster mode on YARN and Kubernetes

Addresses and credentials come from the environment (see `tidemark.connections`), never from arguments. With ``--attempt``, the caller
has written the attempt's row and follows it; otherwise the driver writes the row. With ``--application``, the caller has submitted the
driver to a cluster, with its environment in a file. Exit status: 0 done, 1 refused or failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from tidemark import project
from tidemark.connections import database_url, from_env
from tidemark.consume.assignment import narrowed
from tidemark.consume.batch import Engine
from tidemark.consume.run import consume, open_attempt
from tidemark.db import session, transaction
from tidemark.driver.environment import require_same_version
from tidemark.driver.process import die_with_parent
from tidemark.driver.submission import read_variables
from tidemark.errors import TidemarkError
from tidemark.offsets.store import TaskIdentity, start_driver
from tidemark.packages import optional, require
from tidemark.spec import find_consumer
from tidemark.spec.user_transform import import_from, load_permanent
from tidemark.text.wording import indented
from tidemark.values.fields import transform_of
from tidemark.waiting import watch


def main() -> int:
    die_with_parent()
    options = _parser().parse_args()
    stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")  # fd 2 is hidden while the JVM starts
    handler = logging.StreamHandler(stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    for name in ("py4j", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    watch()
    try:
        with optional():
            _consume(options)
    except TidemarkError as error:
        sys.stderr.write(f"{indented(str(error))}\n")
        return 1
    return 0


class _Formatter(logging.Formatter):
    """Indents continuation lines, so that text from a record cannot imitate a log line."""

    def format(self, record: logging.LogRecord) -> str:
        return indented(super().format(record))


def _consume(options: argparse.Namespace) -> None:
    if options.application:
        read_variables()
        with session(database_url()) as connection, transaction(connection) as cur:
            start_driver(cur, options.attempt, options.application)
    connections = from_env()
    spec = narrowed(find_consumer(options.name, options.consumers or project.consumers()), options.partition)
    folders = [*options.transforms, project.transforms()]
    import_from(folders)  # a user's assignor is needed before the transform
    attempt = options.attempt or open_attempt(connections.database_url, spec.group, TaskIdentity())

    def start(records: int | None, rehearsed: str | None) -> Engine:
        require_same_version()  # here, where `consume` stores a refusal as the attempt's error
        require(spec.extras)
        from tidemark.spark.engine import SparkEngine

        transform = transform_of(spec, folders, rehearsed)
        return SparkEngine(spec, connections, transform, load_permanent(spec, folders), attempt, folders, records)

    consume(spec, connections, attempt, start, drain=options.drain)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run a consumer once.")
    parser.add_argument("name", help="name of the consumer: its file name without the extension")
    parser.add_argument("--consumers", type=Path, metavar="DIR", help="folder of the consumers' files")
    parser.add_argument("--transforms", type=Path, action="append", default=[], metavar="DIR", help="another folder of transforms")
    parser.add_argument("--drain", action="store_true", help="read the due records of its retry topics instead of its topics")
    parser.add_argument("--partition", action="append", default=[], metavar="TOPIC:0,1,5-9", help="read only these partitions")
    parser.add_argument("--attempt", type=int, metavar="ID", help="id of an attempt whose row already exists")
    parser.add_argument("--application", metavar="NAME", help="name under which the driver was submitted to a cluster")
    return parser


if __name__ == "__main__":
    sys.exit(main())
