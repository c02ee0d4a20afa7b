"""The DAG ``rewind``, and ``rewind__<consumer>`` for consumers with ``access``: moves a running group. Form, plan, approval, apply."""

from airflow.sdk import DAG

from tidemark.airflow.dags.rewind import rewind_dags

dags: dict[str, DAG] = rewind_dags()
globals().update(dags)
