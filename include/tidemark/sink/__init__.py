"""Loads Arrow batches into the user's own table, with the offset, the failed records and the ledger row, in one transaction (I1, I3).

- `commit` makes the seven numbered steps (`steps`) for a slice, `drained` for a slice of a retry topic, `staged` for a whole batch at once.
  `target` says where to commit.
- `table` reads and checks the sink's columns, `types` matches Arrow types to Postgres types exactly, `encode` produces binary COPY.
- `load` writes the rows, `hand_off` writes the failed records, `tally` accounts for every record of a slice.
- `overwritten` keeps rows of an upsert sink that an undo would restore, `spool` keeps a transform's output on disk until the commit.

Knows Arrow and Postgres, but neither Spark nor Airflow.
"""
