"""The DAG ``discard``, and ``discard__<consumer>`` for consumers with ``access``: settles failed records. Form, plan, apply."""

from airflow.sdk import DAG

from tidemark.airflow.dags.discard import discard_dags

dags: dict[str, DAG] = discard_dags()
globals().update(dags)
