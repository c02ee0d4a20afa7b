-- Statements that write rows to an upsert sink.

-- name: make_slice
-- The temporary table for an upsert's rows before the merge. Dropped at the end of the transaction.
CREATE TEMP TABLE IF NOT EXISTS {name} ON COMMIT DROP AS SELECT {columns} FROM {sink} WITH NO DATA;

-- name: defaults
-- The default expressions of a table's columns. Locks nothing.
SELECT attname, pg_get_expr(adbin, adrelid) FROM pg_attrdef JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
 WHERE adrelid = to_regclass(%(table)s) AND attname = ANY (%(columns)s);

-- name: default_of_slice
-- Copies a column's default from the sink to the temporary table.
ALTER TABLE {slice} ALTER COLUMN {column} SET DEFAULT {default};

-- name: merge
-- Writes the last row of each key, replacing the sink's row if that is older. Locks the rows that it finds.
INSERT INTO {sink} AS present ({columns})
SELECT DISTINCT ON ({key}) {columns} FROM {source} AS source ORDER BY {key}, kafka_offset DESC, kafka_seq DESC
ON CONFLICT ({key}) DO UPDATE SET {assignments} WHERE {replaceable};

-- name: keys
-- The number of distinct keys; `merge` writes at most one row for each. Locks nothing.
SELECT count(*) FROM (SELECT DISTINCT {key} FROM {source} AS source) AS keys;

-- name: not_replaceable
-- One of the rows that `merge` did not write because their key came from another partition. Locks nothing.
SELECT {values}, topic.name, present.kafka_partition
  FROM {source} AS newer JOIN {sink} present ON {same_key} JOIN tidemark.topic ON topic_id = present.kafka_topic_id
 WHERE NOT ({same_partition}) LIMIT 1;

-- name: came_late
-- The number of rows that `merge` did not write because the sink has a newer one, which `merge` has locked. Locks nothing.
WITH latest AS MATERIALIZED (
    SELECT DISTINCT ON ({key}) {columns} FROM {source} AS source ORDER BY {key}, kafka_offset DESC, kafka_seq DESC
)
SELECT count(*) FROM latest newer JOIN {sink} present ON {same_key} WHERE {newer_there};
