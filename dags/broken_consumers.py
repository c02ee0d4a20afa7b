"""No DAG: an import error on Airflow's home page, with all problems, while a consumer's file is broken."""

from tidemark.airflow.dags import refuse_broken_files

refuse_broken_files()
