"""The DAG ``drain_retries``: every few minutes, what has failed is published, and what is due is tried again."""

from airflow.sdk import DAG

from tidemark.airflow.retries import drain_dag

dag: DAG = drain_dag()
