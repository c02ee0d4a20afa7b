"""The DAG ``drain_retries``: publishes failed records to their retry topics and tries due records again."""

from airflow.sdk import DAG

from tidemark.airflow.dags.retries import drain_dag

dag: DAG = drain_dag()
