"""What the tasks of the DAGs do. Only a running task imports these modules: they need packages that DAG files must not import.

Modules::

    consume        `consume` of a consumer's DAG, of drains, and of a rewind's backfill
    discard        `plan` and `apply` of the DAG `discard`
    drain_retries  `relay` and `due` of the DAG `drain_retries`
    maintain       the DAG `maintain`
    redrive        `plan` and `apply` of the DAG `redrive`
    rewind         the tasks of the DAG `rewind`
    validate       `validate` and `publish` of a consumer's DAG and of drains
"""
