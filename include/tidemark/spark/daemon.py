"""PySpark's daemon, which forks the Python workers, after importing what a slice needs: once, instead of in each worker.

Set as ``spark.python.daemon.module``. A fork takes 10 ms, the imports take most of a second.
"""

from __future__ import annotations

import confluent_kafka  # noqa: F401, TID253
import pgpq  # noqa: F401, TID253
import psycopg2  # noqa: F401
import pyarrow.compute  # noqa: F401, TID253
import pyspark.worker  # noqa: F401, TID253
from pyspark import daemon  # noqa: TID253

import tidemark.spark.engine  # noqa: F401
from tidemark.consume.work import collect_less_garbage

if __name__ == "__main__":
    collect_less_garbage()
    daemon.manager()
