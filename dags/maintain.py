"""The DAG ``maintain``: removes old archives and payloads."""

from airflow.sdk import DAG

from tidemark.airflow.dags.maintain import maintain_dag

dag: DAG = maintain_dag()
