-- Statements that compare the rows that a rewind took out with the rows of the replay. They lock nothing.

-- name: spans
-- The replay's progress on each partition of a rewind: [start, until) has been read again.
SELECT part.topic_id, part.partition, part.superseded_from AS start,
       greatest(part.superseded_from, least(part.old_offset, pos.next_offset)) AS until, part.old_offset AS goal
  FROM tidemark.rewind_partition part JOIN tidemark.partition_offset pos USING (group_id, topic_id, partition)
 WHERE rewind_id = %(rewind_id)s AND group_id = %(group_id)s AND NOT hold AND old_offset > superseded_from
 ORDER BY topic_id, partition;

-- name: kept
SELECT {columns} FROM {relation}

-- name: nothing
SELECT {columns} FROM {table} WHERE false

-- name: written_over
-- As `kept`, for rows from before the rewind that the replay overwrote: the last one of each key before the rewind's point.
SELECT DISTINCT ON ({key}) {columns}
  FROM tidemark.rewound_row newer
  JOIN tidemark.rewind_partition part USING (group_id, topic_id, partition)
  JOIN tidemark.rewind mine ON mine.rewind_id = part.rewind_id
  JOIN tidemark.rewind keeper ON keeper.rewind_id = newer.rewind_id AND keeper.applied_no >= mine.applied_no
 WHERE part.rewind_id = {rewind_id} AND newer.group_id = {group_id} AND newer.sink = {sink_name} AND newer.parked_by IS NULL
   AND (newer.kafka_topic_id <> newer.topic_id OR newer.kafka_partition <> newer.partition OR newer.kafka_offset < part.superseded_from)
 ORDER BY {key}, newer.kafka_topic_id DESC, newer.kafka_offset DESC

-- name: judged
-- The rows that were taken out or overwritten, joined with the current ones, as far as they have been replayed. Part of the statements
-- below.
WITH span AS MATERIALIZED (
    SELECT * FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[], %(starts)s::bigint[], %(untils)s::bigint[])
             AS span (topic_id, partition, start, until)
), was AS (
    SELECT kept.*, true AS taken_out FROM ({archives}) kept
      JOIN span ON kafka_topic_id = topic_id AND kafka_partition = partition AND kafka_offset >= start AND kafka_offset < until
     UNION ALL
    SELECT written_over.*, false FROM ({written_over}) written_over
), now AS (
    SELECT written.*, kafka_offset < until AS replayed FROM {table} written
      JOIN span ON kafka_topic_id = topic_id AND kafka_partition = partition AND kafka_offset >= start AND (kafka_offset < until OR {by_key})
), judged AS (
    SELECT CASE WHEN now.replayed IS NULL THEN 'gone' WHEN was.kafka_offset IS NULL THEN 'new'
                WHEN ROW({was})::text = ROW({now})::text THEN 'equal' ELSE 'changed' END AS verdict,
           was.kafka_offset, CASE WHEN was.kafka_offset IS NOT NULL THEN was END AS was, CASE WHEN now.replayed IS NOT NULL THEN now END AS now
      FROM was FULL JOIN now ON {same}
     WHERE was.taken_out OR now.replayed
)

-- name: counts
SELECT verdict, count(*) FROM judged GROUP BY verdict;

-- name: deletions
-- The keys that were deleted when the rewind was applied, or that the replay has deleted, without keys whose rows were taken out: these are
-- judged as rows. A row from before the rewind that is no longer deleted is new.
WITH span AS MATERIALIZED (
    SELECT * FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[], %(starts)s::bigint[], %(untils)s::bigint[])
             AS span (topic_id, partition, start, until)
), deleted AS (
    SELECT DISTINCT ON (digest, parked_by) deletion.*, start FROM tidemark.deletion
      JOIN span ON kafka_topic_id = topic_id AND kafka_partition = partition AND kafka_offset >= start AND kafka_offset < until
     WHERE sink = %(sink)s AND (parked_by IS NULL OR parked_by = %(rewind_id)s)
     ORDER BY digest, parked_by, kafka_offset DESC, kafka_seq DESC
), judged AS (
    SELECT coalesce(was.key, now.key) AS key, was.digest IS NOT NULL AS was_deleted, coalesce(was.start, now.start) AS start,
           now.digest IS NOT NULL AND present.kafka_offset > now.kafka_offset IS NOT TRUE AS now_deleted,
           coalesce(now.kept_offset, present.kafka_offset) AS before, present.kafka_offset AS there
      FROM (SELECT * FROM deleted WHERE parked_by IS NOT NULL) was
      FULL JOIN (SELECT * FROM deleted WHERE parked_by IS NULL) now USING (digest)
      LEFT JOIN {table} present ON {present_key}
     WHERE NOT EXISTS (SELECT FROM ({archives}) taken WHERE {taken_key})
), verdict AS (
    SELECT CASE WHEN was_deleted AND now_deleted THEN 'equal' WHEN was_deleted AND there < start THEN 'new'
                WHEN now_deleted AND before < start THEN 'gone' END AS verdict, key
      FROM judged
)
SELECT verdict, count(*), (array_agg(key))[1:%(limit)s] FROM verdict WHERE verdict IS NOT NULL GROUP BY 1;

-- name: examples
SELECT to_jsonb(was) - 'taken_out', to_jsonb(now) - 'replayed' - %(hidden)s::text[] FROM judged WHERE verdict = %(verdict)s LIMIT %(limit)s;

-- name: outside
-- As `written_over`, for the rows of a sink that a swap leaves, unless the replay has their keys. Part of the statements above.
SELECT {columns} FROM {relation} present
 WHERE NOT EXISTS (SELECT FROM span WHERE present.kafka_topic_id = span.topic_id AND present.kafka_partition = span.partition
                      AND present.kafka_offset >= start AND present.kafka_offset < until)

-- name: deletions_beside
-- As `deletions`, before the swap of a replay beside: the keys that the sink's deletions in force have deleted, and those of the shadow.
WITH span AS MATERIALIZED (
    SELECT * FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[], %(starts)s::bigint[], %(untils)s::bigint[])
             AS span (topic_id, partition, start, until)
), deleted AS (
    SELECT DISTINCT ON (digest, sink) deletion.*, start FROM tidemark.deletion
      JOIN span ON kafka_topic_id = topic_id AND kafka_partition = partition AND kafka_offset >= start AND kafka_offset < until
     WHERE sink IN (%(sink)s, %(shadow)s) AND parked_by IS NULL
     ORDER BY digest, sink, kafka_offset DESC, kafka_seq DESC
), judged AS (
    SELECT coalesce(was.key, now.key) AS key, coalesce(was.start, now.start) AS start, was.kept_offset, present.kafka_offset AS there,
           was.digest IS NOT NULL AND present.kafka_offset IS NULL AS was_deleted,
           now.digest IS NOT NULL AND replayed.kafka_offset IS NULL AS now_deleted, replayed.kafka_offset IS NOT NULL AS replayed
      FROM (SELECT * FROM deleted WHERE sink = %(sink)s) was
      FULL JOIN (SELECT * FROM deleted WHERE sink = %(shadow)s) now USING (digest)
      LEFT JOIN {live} present ON {present_key}
      LEFT JOIN {shadow} replayed ON {replayed_key}
), verdict AS (
    SELECT CASE WHEN was_deleted AND now_deleted THEN 'equal' WHEN was_deleted AND NOT replayed AND kept_offset < start THEN 'new'
                WHEN now_deleted AND there < start THEN 'gone' END AS verdict, key
      FROM judged
)
SELECT verdict, count(*), (array_agg(key))[1:%(limit)s] FROM verdict WHERE verdict IS NOT NULL GROUP BY 1;
