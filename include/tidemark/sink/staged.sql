-- Statements on staging tables, tidemark_staging.staged_<attempt>_<number>_<random>.

-- name: left_behind
-- Staging tables that killed drivers left behind: their attempts have ended. Locks nothing.
SELECT relnamespace::regnamespace || '.' || relname FROM pg_class
 WHERE relnamespace = 'tidemark_staging'::regnamespace AND relkind = 'r'
   AND relname ~ '^staged_[0-9]+_[0-9]+(_[0-9a-f]+)?$' AND pg_has_role(relowner, 'USAGE')
   AND EXISTS (SELECT FROM tidemark.attempt WHERE attempt_id::text = split_part(relname, '_', 2) AND state <> 'RUNNING');

-- name: fail_refused
-- Fails the records of rejected rows, with all of their rows.
UPDATE {table} staged SET disposition = 'fail', error = refused.error
  FROM (SELECT kafka_topic_id, kafka_partition, kafka_offset, min(error) AS error FROM {table}
         WHERE {heard} AND disposition = '{refused}' GROUP BY 1, 2, 3) refused
 WHERE {heard} AND staged.kafka_topic_id = refused.kafka_topic_id AND staged.kafka_partition = refused.kafka_partition
   AND staged.kafka_offset = refused.kafka_offset;

-- name: account
-- Counts of each partition's records by disposition. ``torn`` is a record with several dispositions.
WITH record AS (
    SELECT kafka_topic_id, kafka_partition, kafka_offset, min(said) AS disposition, max(said) AS other, count(*) AS rows,
           count(*) FILTER (WHERE disposition = 'delete') AS deleted
      FROM {table}, coalesce(nullif(disposition, 'delete'), 'load') said WHERE {heard} GROUP BY 1, 2, 3
)
SELECT kafka_topic_id, kafka_partition, min(kafka_offset) AS first, max(kafka_offset) AS last,
       min(kafka_offset) FILTER (WHERE disposition <> other) AS torn,
       count(*) FILTER (WHERE disposition = 'load') AS loaded, count(*) FILTER (WHERE disposition = 'skip') AS skipped,
       count(*) FILTER (WHERE disposition = 'retry') AS retried, count(*) FILTER (WHERE disposition = 'fail') AS failed,
       coalesce(sum(rows) FILTER (WHERE disposition = 'load'), 0)::bigint AS sink_rows,
       coalesce(sum(deleted) FILTER (WHERE disposition = 'load'), 0)::bigint AS deleted
  FROM record GROUP BY 1, 2;

-- name: not_loaded
SELECT kafka_offset, disposition, min(error) FROM {table}
 WHERE {heard} AND {span} AND disposition IN ('retry', 'fail')
 GROUP BY 1, 2 ORDER BY 1;

-- name: make_staging
CREATE UNLOGGED TABLE {table} AS SELECT {columns} FROM {sinks} WITH NO DATA;

-- name: count
SELECT count(*) FROM {source} AS source;

-- name: make_ready
-- The staged rows to load into a sink, in the sink's form.
CREATE TEMP VIEW {ready} AS SELECT {columns}, {lineage} FROM {table} WHERE {heard} AND {of_sink} AND disposition IN ('load', 'delete');

-- name: append
INSERT INTO {sink} ({columns}) SELECT {columns} FROM {source} AS source;

-- name: key_twice
-- A key whose rows have no last one.
SELECT {key} FROM {source} AS source GROUP BY {key} HAVING {several} LIMIT 1;

-- name: places
-- The origin of a key's rows: the first record of each partition.
SELECT topic.name, kafka_partition, min(kafka_offset) FROM {source} AS source JOIN tidemark.topic ON topic_id = kafka_topic_id
 WHERE {same_key} GROUP BY 1, 2 ORDER BY 1, 2 LIMIT 3;

-- name: ready_span
(SELECT * FROM {ready} WHERE {span})

-- name: fail_span
UPDATE {table} SET disposition = %(disposition)s, error = %(error)s WHERE {span};

-- name: strangers
-- A row of a record that was not retried.
SELECT kafka_offset FROM {table}
 WHERE {heard} AND (kafka_topic_id, kafka_partition, kafka_offset) NOT IN
       (SELECT * FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[], %(offsets)s::bigint[])) LIMIT 1;

-- name: leave_out
-- Keeps only the rows of these records.
DELETE FROM {table}
 WHERE {heard} AND (kafka_topic_id, kafka_partition, kafka_offset) NOT IN
       (SELECT * FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[], %(offsets)s::bigint[]));

-- name: outcomes
-- The outcome of each retried record.
SELECT kafka_topic_id, kafka_partition, kafka_offset, min(said), max(said), count(*), count(*) FILTER (WHERE disposition = 'delete'), min(error)
  FROM {table}, coalesce(nullif(disposition, 'delete'), 'load') said WHERE {heard} GROUP BY 1, 2, 3;
