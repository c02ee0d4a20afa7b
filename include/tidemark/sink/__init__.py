"""Arrow batches into the user's own table, with the offset, the failed records and the ledger row, in one transaction (I1, I3).

`table` reads the sink's columns, `types` is the exact guard between Arrow's types and Postgres', `encode` makes binary COPY,
`tally` accounts for every record of a slice, `kept` keeps rows of an upsert sink that an undo would want back, `commit` is the seven
numbered steps. Knows Arrow and Postgres, neither Spark nor Airflow.
"""
