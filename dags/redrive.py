"""The DAG ``redrive``, and ``redrive__<consumer>`` for consumers with ``access``: retries failed records. Form, plan, apply."""

from airflow.sdk import DAG

from tidemark.airflow.dags.redrive import redrive_dags

dags: dict[str, DAG] = redrive_dags()
globals().update(dags)
