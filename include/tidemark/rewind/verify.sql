-- Statements that compare what a rewind took out with what the replay has made since. They lock nothing.

-- name: spans
-- How far the replay of each partition of a rewind has come: [superseded_from, until) has been read again.
SELECT part.topic_id, part.partition, part.superseded_from AS start,
       greatest(part.superseded_from, least(part.old_offset, pos.next_offset)) AS until, part.old_offset AS goal
  FROM tidemark.rewind_partition part JOIN tidemark.partition_offset pos USING (group_id, topic_id, partition)
 WHERE rewind_id = %(rewind_id)s AND group_id = %(group_id)s AND NOT hold AND old_offset > superseded_from
 ORDER BY topic_id, partition;

-- name: archives
SELECT relation, rows, removed_at IS NOT NULL OR to_regclass(relation) IS NULL AS gone
  FROM tidemark.rewind_archive
 WHERE rewind_id = %(rewind_id)s AND group_id = %(group_id)s AND put_back_at IS NULL ORDER BY number;

-- name: kept
SELECT {columns} FROM {relation}

-- name: nothing
SELECT {columns} FROM {table} WHERE false

-- name: judged
-- The rows that were taken out beside those that are there, as far as they have been replayed. A part of the statements below.
WITH span AS MATERIALIZED (
    SELECT * FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[], %(starts)s::bigint[], %(untils)s::bigint[])
             AS span (topic_id, partition, start, until)
), was AS (
    SELECT kept.* FROM ({archives}) kept
      JOIN span ON kafka_topic_id = topic_id AND kafka_partition = partition AND kafka_offset >= start AND kafka_offset < until
), now AS (
    SELECT written.*, kafka_offset < until AS replayed FROM {table} written
      JOIN span ON kafka_topic_id = topic_id AND kafka_partition = partition AND kafka_offset >= start AND (kafka_offset < until OR {by_key})
), judged AS (
    SELECT CASE WHEN now.replayed IS NULL THEN 'gone' WHEN was.kafka_offset IS NULL THEN 'new'
                WHEN ROW({was})::text = ROW({now})::text THEN 'equal' ELSE 'changed' END AS verdict,
           was.kafka_offset, CASE WHEN was.kafka_offset IS NOT NULL THEN was END AS was, CASE WHEN now.replayed IS NOT NULL THEN now END AS now
      FROM was FULL JOIN now ON {same}
     WHERE was.kafka_offset IS NOT NULL OR now.replayed
)

-- name: counts
SELECT verdict, count(*) FROM judged GROUP BY verdict;

-- name: examples
SELECT to_jsonb(was), to_jsonb(now) - 'replayed' FROM judged WHERE verdict = %(verdict)s LIMIT %(limit)s;
