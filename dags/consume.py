"""One DAG ``consume__<consumer>`` for each file in ``include/consumers``."""

from airflow.sdk import DAG

from tidemark.airflow.dags.consume import consume_dags

dags: dict[str, DAG] = consume_dags()
globals().update(dags)
