"""The edge to Airflow: DAGs from consumers' files, operators that call one library function each, connections.

Runs in three places: a DAG file calls `dags.consume_dags` (imports nothing heavy, reads neither Kafka nor Postgres), the operators'
``execute`` runs in a task, and the driver that it starts runs in a process group of its own that never outlives the task.
"""
