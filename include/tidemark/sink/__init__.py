"""Loads Arrow batches into the user's own table, with the offset, the failed records and the ledger row, in one transaction (I1, I3).

Knows Arrow and Postgres, but neither Spark nor Airflow.

Modules::

    commit         the seven steps of a slice's commit, and the fence
    deleted        rows that records delete, and the deletions that late records meet
    drained        the same steps for a slice of a retry topic
    encode         Arrow to binary COPY
    hand_off       step ④: the records that are not loaded
    load           COPY, or COPY and merge; isolates refused rows
    numeric        numbers of any size in Postgres' binary form
    overwritten    rows that are overwritten while a rewind can be undone
    spool          transform output kept outside the transaction
    staged         the commit of a whole batch by the driver
    steps          the numbers of the seven steps
    suppressed     what erasures keep out of the sink
    table          the sink's columns, its requirements and its DDL
    tally          accounts for every record, and adds the lineage (I3)
    target         where and by which rules a slice is committed
    types          the guard between Arrow's types and Postgres'
"""
