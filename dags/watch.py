"""The DAG ``watch``, if a consumer has objectives: fails the consumer's task once when one is missed."""

from airflow.sdk import DAG

from tidemark.airflow.dags.watch import watch_dags

dags: dict[str, DAG] = watch_dags()
globals().update(dags)
