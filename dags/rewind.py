"""The DAG ``rewind``: moves a running group. Form, plan, approval, apply."""

from airflow.sdk import DAG

from tidemark.airflow.rewind import rewind_dag

dag: DAG = rewind_dag()
