"""Tidemark's page in Airflow: consumers, groups, rewinds, retries, validations, audit log.

Reads Postgres only, and no route changes anything. No view waits for Kafka; only the `preview` in the form for a rewind asks it. A rewind
or a redrive is a run of its DAG, which the browser asks Airflow's own API for, under the user's name. Each database is asked in a read-only
transaction with time limits of its own; a database that does not answer is reported beside the others' answers.

Every route needs the right to see plugins. A consumer is shown to users who may see its DAG ``consume__<consumer>``, and the
payloads of its records to users who may edit that DAG (`guards`).

``static/`` has the ES modules of the page: plain JavaScript over Airflow's own React and Chakra, without a build step.

Modules::

    app          the FastAPI app: routes, headers, errors
    consumers    the consumers' files and their databases
    dag_facts    facts about the consumers' DAGs from Airflow's database
    detail       one group
    guards       permissions: who may read what
    history      rewinds, validations and events of several consumers
    offers       what the forms offer, and how many records their filters choose
    overview     all groups in one table
    payload      a record's key, value and headers, within limits
    preview      the effects of a rewind before its plan
    rebalances   the moves of each rebalance of a group
    replays      replays beside that are neither swapped nor discarded
    retries      waiting and failed records
    source       the file of a consumer's transform
"""
