"""The DAG ``redrive``: retries failed records. Form, plan, apply."""

from airflow.sdk import DAG

from tidemark.airflow.redrive import redrive_dag

dag: DAG = redrive_dag()
