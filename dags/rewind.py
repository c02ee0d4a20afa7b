"""The DAG ``rewind``: a form, a plan, an approval, and the move of a running group."""

from airflow.sdk import DAG

from tidemark.airflow.rewind import rewind_dag

dag: DAG = rewind_dag()
