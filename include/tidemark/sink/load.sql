-- Statements that put rows into an upsert sink.

-- name: make_slice
-- Where the rows of an upsert wait for the merge. Gone with the transaction.
CREATE TEMP TABLE IF NOT EXISTS tidemark_slice ON COMMIT DROP AS SELECT {columns} FROM {sink} WITH NO DATA;

-- name: merge
-- Of rows with one key the last, in place of the one that the sink has, if that is a row it may replace. Locks the rows that it finds.
WITH latest AS MATERIALIZED (
    SELECT DISTINCT ON ({key}) {columns} FROM {source} AS source ORDER BY {key}, kafka_offset DESC, kafka_seq DESC
), written AS (
    INSERT INTO {sink} AS present ({columns}) SELECT {columns} FROM latest
    ON CONFLICT ({key}) DO UPDATE SET {assignments} WHERE {replaceable} RETURNING 1
)
SELECT (SELECT count(*) FROM latest), (SELECT count(*) FROM written);

-- name: not_replaceable
-- One of the rows that `merge` left out because their key is another partition's. Locks nothing.
SELECT {values}, topic.name, present.kafka_partition
  FROM {source} AS newer JOIN {sink} present ON {same_key} JOIN tidemark.topic ON topic_id = present.kafka_topic_id
 WHERE NOT ({same_partition}) LIMIT 1;

-- name: came_late
-- How many rows `merge` left out because a newer one is there; `merge` has locked that. Locks nothing.
WITH latest AS MATERIALIZED (
    SELECT DISTINCT ON ({key}) {columns} FROM {source} AS source ORDER BY {key}, kafka_offset DESC, kafka_seq DESC
)
SELECT count(*) FROM latest newer JOIN {sink} present ON {same_key} WHERE {newer_there};
