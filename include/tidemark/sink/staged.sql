-- Statements that promote the rows of a staging table.

-- name: make_views
-- The rows of the tries that reported to the driver; and what happens to each record: its lowest and its highest disposition, which differ
-- only if the transform contradicts itself. A delete counts as load. Dropped with the table.
CREATE TEMP VIEW tidemark_staged AS SELECT * FROM {table} WHERE {reported};
CREATE TEMP VIEW tidemark_record AS
SELECT kafka_topic_id, kafka_partition, kafka_offset, min(outcome) AS disposition, max(outcome) AS other, count(*) AS rows,
       count(*) FILTER (WHERE staged.disposition = 'delete') AS deleted, min(error) AS error
  FROM pg_temp.tidemark_staged staged, coalesce(nullif(staged.disposition, 'delete'), 'load') outcome GROUP BY 1, 2, 3;

-- name: fail_refused
-- Fails the records of rejected rows, with all of their rows.
UPDATE pg_temp.tidemark_staged staged SET disposition = 'fail', error = refused.error
  FROM (SELECT kafka_topic_id, kafka_partition, kafka_offset, min(error) AS error FROM pg_temp.tidemark_staged
         WHERE disposition = '{refused}' GROUP BY 1, 2, 3) refused
 WHERE staged.kafka_topic_id = refused.kafka_topic_id AND staged.kafka_partition = refused.kafka_partition
   AND staged.kafka_offset = refused.kafka_offset;

-- name: account
-- Counts of each partition's records by disposition. ``contradictory`` is a record with several dispositions.
SELECT kafka_topic_id, kafka_partition, min(kafka_offset) AS first, max(kafka_offset) AS last,
       min(kafka_offset) FILTER (WHERE disposition <> other) AS contradictory,
       count(*) FILTER (WHERE disposition = 'load') AS loaded, count(*) FILTER (WHERE disposition = 'skip') AS skipped,
       count(*) FILTER (WHERE disposition = 'retry') AS retried, count(*) FILTER (WHERE disposition = 'fail') AS failed,
       coalesce(sum(rows) FILTER (WHERE disposition = 'load'), 0)::bigint AS sink_rows,
       coalesce(sum(deleted) FILTER (WHERE disposition = 'load'), 0)::bigint AS deleted
  FROM pg_temp.tidemark_record GROUP BY 1, 2;

-- name: not_loaded
SELECT kafka_offset, disposition, error FROM pg_temp.tidemark_record WHERE {span} AND disposition IN ('retry', 'fail') ORDER BY 1;

-- name: outcomes
SELECT kafka_topic_id, kafka_partition, kafka_offset, disposition, other, rows, deleted, error FROM pg_temp.tidemark_record;

-- name: count
SELECT count(*) FROM {source} AS source;

-- name: make_ready
-- The staged rows to load into a sink, in the sink's form.
CREATE TEMP VIEW {ready} AS SELECT {columns}, {lineage} FROM pg_temp.tidemark_staged WHERE {of_sink} AND disposition IN ('load', 'delete');

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
UPDATE pg_temp.tidemark_staged SET disposition = %(disposition)s, error = %(error)s WHERE {span};

-- name: not_tried
-- A row of a record that was not retried.
SELECT kafka_offset FROM pg_temp.tidemark_staged
 WHERE (kafka_topic_id, kafka_partition, kafka_offset) NOT IN
       (SELECT * FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[], %(offsets)s::bigint[])) LIMIT 1;

-- name: leave_out
-- Keeps only the rows of these records.
DELETE FROM pg_temp.tidemark_staged
 WHERE (kafka_topic_id, kafka_partition, kafka_offset) NOT IN
       (SELECT * FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[], %(offsets)s::bigint[]));
