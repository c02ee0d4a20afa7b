"""The DAG ``maintain``."""

from airflow.sdk import DAG

from tidemark.airflow.maintain import maintain_dag

dag: DAG = maintain_dag()
