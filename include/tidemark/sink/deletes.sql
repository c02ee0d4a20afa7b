-- Statements that delete rows of an upsert sink.

-- name: any_deletions
-- Whether a slice's rows include deletes, and whether deletions after the start of one of these slices are in force. A topic that was created
-- again counts as later. One index lookup per slice and topic. Locks nothing.
SELECT EXISTS (SELECT FROM {source} AS source WHERE kafka_deleted),
       EXISTS (SELECT FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[], %(starts)s::bigint[]) part (topic_id, partition, start)
                 JOIN tidemark.topic USING (topic_id)
                 JOIN tidemark.topic later ON later.name = topic.name AND later.topic_id >= part.topic_id
                WHERE CASE WHEN later.topic_id = part.topic_id THEN start ELSE 0 END
                      <= (SELECT max(kafka_offset) FROM tidemark.deletion
                           WHERE sink = %(sink)s AND parked_by IS NULL
                             AND kafka_topic_id = later.topic_id AND kafka_partition = part.partition));

-- name: enter
-- Stores the deletions of a slice.
INSERT INTO tidemark.deletion (sink, kafka_topic_id, kafka_partition, kafka_offset, kafka_seq, digest, key)
SELECT {sink_name}, kafka_topic_id, kafka_partition, kafka_offset, kafka_seq, {digest}, {key_values}
  FROM {source} AS newer WHERE kafka_deleted;

-- name: first_after
-- The first deletion in force after the row ``newer``. Part of other statements.
(SELECT present.deletion_id FROM tidemark.deletion present
  WHERE present.sink = {sink_name} AND present.digest = {digest} AND {in_force} AND {same_partition}
    AND (present.kafka_topic_id, present.kafka_offset, present.kafka_seq) > (newer.kafka_topic_id, newer.kafka_offset, newer.kafka_seq)
  ORDER BY present.kafka_topic_id, present.kafka_offset, present.kafka_seq LIMIT 1)

-- name: last_deletion
-- The last deletion of each key in a slice. Part of other statements.
SELECT DISTINCT ON ({key}) {key}, kafka_topic_id, kafka_partition, kafka_offset, kafka_seq FROM {source} AS source
 WHERE kafka_deleted ORDER BY {key}, kafka_offset DESC, kafka_seq DESC

-- name: keep
-- Stores the last of the rows ``dying`` before each deletion with that deletion. Part of other statements.
UPDATE tidemark.deletion SET kept = jsonb_object({names}, {values}), kept_topic_id = newer.kafka_topic_id, kept_offset = newer.kafka_offset
  FROM (SELECT DISTINCT ON (first_after) * FROM dying WHERE first_after IS NOT NULL
         ORDER BY first_after, kafka_topic_id DESC, kafka_offset DESC, kafka_seq DESC) newer
 WHERE deletion.deletion_id = newer.first_after
   AND (kept_offset IS NULL OR (kept_topic_id, kept_offset) <= (newer.kafka_topic_id, newer.kafka_offset))

-- name: delete
-- Removes the rows that a slice deletes from the sink. Locks them. Returns how many matched, and how many were deleted.
WITH last_deletion AS MATERIALIZED ({last_deletion}), matching AS MATERIALIZED (
    SELECT present.ctid FROM {sink} present JOIN last_deletion newer ON {same_key} WHERE {replaceable}
), removed AS (
    DELETE FROM {sink} present USING last_deletion newer WHERE {same_key} AND {replaceable} RETURNING present.*
), dying AS (
    SELECT newer.*, {first_after} AS first_after FROM removed newer
), kept AS (
    {keep}
)
SELECT (SELECT count(*) FROM matching), (SELECT count(*) FROM removed);

-- name: mark
-- Marks the rows that a slice deletes. Locks them.
WITH last_deletion AS MATERIALIZED ({last_deletion})
UPDATE {sink} present SET kafka_deleted = true FROM last_deletion newer WHERE {same_key} AND {replaceable} AND NOT present.kafka_deleted;

-- name: keep_dying
-- Stores rows of a slice that never reach the sink because a deletion follows.
WITH dying AS (
    SELECT newer.*, {first_after} AS first_after FROM {source} AS newer WHERE NOT kafka_deleted
)
{keep};

-- name: alive
-- The rows of a slice that no deletion follows. Part of other statements.
(SELECT * FROM {source} AS newer WHERE NOT kafka_deleted AND {first_after} IS NULL)

-- name: dying
-- The rows of a slice that a deletion follows. Part of other statements.
(SELECT * FROM {source} AS newer WHERE NOT kafka_deleted AND {first_after} IS NOT NULL)

-- name: marked
-- The rows of a slice, marked if a deletion follows. Part of other statements.
(SELECT {columns}, {first_after} IS NOT NULL AS kafka_deleted FROM {source} AS newer WHERE NOT kafka_deleted)

-- name: deletes
-- The rows of a slice that delete. Part of other statements.
(SELECT * FROM {source} AS newer WHERE kafka_deleted)
