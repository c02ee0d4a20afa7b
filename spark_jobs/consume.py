"""The driver of one run of a consumer: what the command line, Airflow and spark-submit start.

    python spark_jobs/consume.py NAME
    spark-submit spark_jobs/consume.py NAME          # client mode, and cluster mode on YARN and Kubernetes

Addresses and credentials come from the environment (see `tidemark.connections`), never from arguments. With ``--attempt`` the caller
has written the attempt's row and follows it; without, the driver writes one itself. Exit status: 0 done, 1 refused or failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from tidemark import project
from tidemark.connections import from_env
from tidemark.consume.engine import Engine
from tidemark.consume.process import die_with_parent
from tidemark.errors import TidemarkError
from tidemark.waiting import watch


def main() -> int:
    die_with_parent()
    options = _parser().parse_args()
    said = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")  # stderr itself is kept back while the JVM starts
    logging.basicConfig(stream=said, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    watch()
    try:
        _consume(options)
    except TidemarkError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _consume(options: argparse.Namespace) -> None:
    from tidemark.consume.fixed import narrowed
    from tidemark.consume.run import consume, open_attempt
    from tidemark.offsets.store import TaskIdentity
    from tidemark.spec import find_consumer
    from tidemark.spec.transform import import_from, load_permanent, load_transform

    connections = from_env()
    spec = narrowed(find_consumer(options.name, options.consumers or project.consumers()), options.partition)
    folders = [*options.transforms, project.transforms()]
    import_from(folders)  # an assignor of the user's is needed before the transform is
    attempt = options.attempt or open_attempt(connections.database_url, spec.group, TaskIdentity())

    def start(records: int | None) -> Engine:
        from tidemark.spark.engine import SparkEngine

        transform = load_transform(spec, folders)
        return SparkEngine(spec, connections, transform, load_permanent(spec, folders), attempt, folders, records)

    consume(spec, connections, attempt, start, drain=options.drain)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="One run of a consumer.")
    parser.add_argument("name", help="the consumer's name: its file's stem")
    parser.add_argument("--consumers", type=Path, metavar="DIR", help="where the consumers' files are")
    parser.add_argument("--transforms", type=Path, action="append", default=[], metavar="DIR", help="a further folder of transforms")
    parser.add_argument("--drain", action="store_true", help="read what is due in its retry topics, and not its topics")
    parser.add_argument("--partition", action="append", default=[], metavar="TOPIC:0,1,5-9", help="read only these partitions")
    parser.add_argument("--attempt", type=int, metavar="ID", help="the attempt whose row is written")
    return parser


if __name__ == "__main__":
    sys.exit(main())
