"""Loads Arrow batches into the user's own table, with the offset, the failed records and the ledger row, in one transaction (I1, I3).

Knows Arrow and Postgres, but neither Spark nor Airflow.

Modules::

    commit        the seven steps of a commit, and the fence
    compiled_rows Arrow to rows of a binary COPY, in C
    deletes       deletes in upsert sinks, also for late records
    encode        Arrow batches as a binary COPY
    fit           compares the output with the table; DDL
    hand_off      step ④: copies the records that are not loaded
    kept_rows     copies of rows overwritten while a rewind can be undone
    load          COPY, or COPY and merge; isolates refused rows
    numeric       numbers of any size in Postgres' binary form
    python_rows   as `compiled_rows`, in Python
    retry_commit  the steps for a slice of a retry topic
    spool         a transform's output on disk
    staged        the steps for a batch that the driver commits as a whole
    staging       the table into which tasks stage the rows of such a batch
    steps         the numbers of the seven steps
    suppressed    erased records and keys that stay out of the sink
    table         the sink's columns, and how rows are written to it
    tally         accounts for every record and adds the lineage (I3)
    target        database, sinks and limits of a commit
    types         maps Arrow types to Postgres types, and checks them
"""
