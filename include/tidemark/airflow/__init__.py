"""The edge to Airflow: DAGs from consumers' files, operators that call one library function each, connections.

Runs in three places: a DAG file calls `dags.consume_dags` (imports nothing heavy, reads neither Kafka nor Postgres), the operators'
``execute`` runs in a task, and the driver that it starts runs in a process group of its own that never outlives the task.

Modules::

    connections    Airflow's connections as Tidemark's settings
    dags           a DAG from each consumer's file
    due            the asset and the trigger that start drains when records are due
    form           what the DAGs with a form share: checks of the input, approvals
    maintain       the DAG `maintain`
    operators      the tasks consume, validate and publish
    redrive        the DAG `redrive`
    retries        the DAG `drain_retries`
    rewind         the DAG `rewind`
    rewind_form    the form of the DAG `rewind`, and the check of its input
"""
