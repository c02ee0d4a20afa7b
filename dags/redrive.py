"""The DAG ``redrive``: a form, a plan, and failed records that are sent round again."""

from airflow.sdk import DAG

from tidemark.airflow.redrive import redrive_dag

dag: DAG = redrive_dag()
