"""Loads Arrow batches into the user's own table, with the offset, the failed records and the ledger row, in one transaction (I1, I3).

Knows Arrow and Postgres, but neither Spark nor Airflow.

Modules::

    commit        the seven steps of a slice's commit, and the fence
    deletes       rows that records delete, and the deletions that late records meet
    encode        Arrow to binary COPY
    hand_off      step ④: the records that are not loaded
    kept_rows     rows that are overwritten while a rewind can be undone
    load          COPY, or COPY and merge; isolates refused rows
    numeric       numbers of any size in Postgres' binary form
    retry_commit  the same steps for a slice of a retry topic
    spool         transform output kept outside the transaction
    staged        the commit of a whole batch by the driver
    steps         the numbers of the seven steps
    suppressed    what erasures keep out of the sink
    table         the sink's columns, its requirements and its DDL
    tally         accounts for every record, and adds the lineage (I3)
    target        where and by which rules a slice is committed
    types         the guard between Arrow's types and Postgres'
"""
