"""Not a DAG. While a consumer's file is invalid, it makes Airflow's home page show an import error with all problems."""

from tidemark.airflow.dags.consume import refuse_broken_files

refuse_broken_files()
