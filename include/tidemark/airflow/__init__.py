"""Tidemark's Airflow layer. It decides nothing itself: every operator calls the library.

    connections  turns Airflow connections into Tidemark's
    dags         builds one consume DAG for each consumer's file
    operators    holds the operators of a consume DAG: consume, validate, publish
    retries      builds the DAG `drain_retries`
    due          starts a drain as soon as a retry is due
    rewind       builds the DAG `rewind`
    rewind_form  declares and checks the form of that DAG
    redrive      builds the DAG `redrive`, with its form
    form         holds what the DAGs with a form share: field checks and the approval step
    maintain     builds the DAG `maintain`

The code runs in three places. DAG files call `dags.consume_dags`, which imports nothing heavy and reads neither Kafka nor Postgres.
Operators run in a task. The driver runs in its own process group, which never outlives the task.
"""
