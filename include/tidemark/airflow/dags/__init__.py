"""DAGs.

Modules::

    consume   a DAG from each consumer's file
    discard   the DAG `discard`, and one for each consumer with `access`
    maintain  the DAG `maintain`
    redrive   the DAG `redrive`, and one for each consumer with `access`
    retries   the DAG `drain_retries`
    rewind    the DAG `rewind`, and one for each consumer with `access`
    watch     the DAG `watch`, and its trigger
"""
