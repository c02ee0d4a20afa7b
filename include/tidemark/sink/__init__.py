"""Arrow batches into the user's own table, with the offset, the failed records and the ledger row, in one transaction (I1, I3).

Knows Arrow and Postgres, neither Spark nor Airflow.

Modules::

    commit     the seven steps of a slice's commit, and the fence
    drained    the same steps for a slice of a retry topic
    encode     Arrow to binary COPY
    kept       rows that are overwritten while a rewind can be undone
    load       COPY, or COPY and merge; isolates refused rows
    spool      transform output kept outside the transaction
    staged     the commit of a whole batch by the driver
    steps      the numbers of the seven steps
    table      the sink's columns, its requirements and its DDL
    tally      accounts for every record, and adds the lineage (I3)
    types      the guard between Arrow's types and Postgres'
"""
