-- Statements that keep overwritten rows of an upsert sink while a rewind can still be undone.

-- name: floors
-- The floors of these partitions of a sink. Locks them, so that writers of the same partition take turns.
SELECT topic_id, partition FROM tidemark.undo_floor
 WHERE %(sink)s = ANY (coalesce(sinks, ARRAY[sink])) AND (topic_id, partition) IN (SELECT * FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[]))
 ORDER BY topic_id, partition FOR NO KEY UPDATE;

-- name: columns
-- The columns of a sink, except generated ones, and their types without a length: a cast to a length would truncate silently. Locks nothing.
SELECT attname, format_type(atttypid, -1) FROM pg_attribute
 WHERE attrelid = to_regclass(%(table)s) AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum;

-- name: latest
-- The last row of each key. Part of other statements.
SELECT DISTINCT ON ({key}) {columns} FROM {source} AS source ORDER BY {key}, kafka_offset DESC, kafka_seq DESC

-- name: keep_replaced
-- Copies the rows that a merge is about to replace, if they lie below the floor. Locks them.
WITH latest AS MATERIALIZED ({latest})
INSERT INTO tidemark.rewound_row (rewind_id, group_id, topic_id, partition, sink, elsewhere,
                                  kafka_topic_id, kafka_partition, kafka_offset, kafka_seq, kept)
SELECT floor.rewind_id, floor.group_id, floor.topic_id, floor.partition, {sink_name},
       (present.kafka_topic_id, present.kafka_partition) <> (floor.topic_id, floor.partition) AND {any_partition},
       present.kafka_topic_id, present.kafka_partition, present.kafka_offset, present.kafka_seq, jsonb_object({names}, {values})
  FROM latest newer
  JOIN tidemark.undo_floor floor ON {of_sink} AND floor.topic_id = newer.kafka_topic_id AND floor.partition = newer.kafka_partition
  JOIN {sink} present ON {same_key}
 WHERE ({replaceable})
   AND ((present.kafka_topic_id, present.kafka_partition) <> (floor.topic_id, floor.partition) OR present.kafka_offset < floor.floor)
   FOR NO KEY UPDATE OF present;

-- name: keep_late
-- Copies rows below the floor that come too late for the sink: an undo may remove the newer row, or revert the deletion.
WITH latest AS MATERIALIZED ({latest})
INSERT INTO tidemark.rewound_row (rewind_id, group_id, topic_id, partition, sink, elsewhere,
                                  kafka_topic_id, kafka_partition, kafka_offset, kafka_seq, kept)
SELECT floor.rewind_id, floor.group_id, floor.topic_id, floor.partition, {sink_name}, false,
       newer.kafka_topic_id, newer.kafka_partition, newer.kafka_offset, newer.kafka_seq, jsonb_object({names}, {values})
  FROM latest newer
  JOIN tidemark.undo_floor floor ON {of_sink} AND floor.topic_id = newer.kafka_topic_id AND floor.partition = newer.kafka_partition
  {newer_row}
 WHERE newer.kafka_offset < floor.floor;

-- name: same_partition
-- Whether the present row comes from the same Kafka partition, possibly of another incarnation of the topic.
present.kafka_partition = {newer}.kafka_partition AND (present.kafka_topic_id = {newer}.kafka_topic_id OR EXISTS (
    SELECT FROM tidemark.topic other JOIN tidemark.topic now USING (name)
     WHERE other.topic_id = present.kafka_topic_id AND now.topic_id = {newer}.kafka_topic_id))

-- name: not_newer
-- For rows of one partition: whether the present row's record is earlier or the same. A re-created topic has a higher id.
(present.kafka_topic_id, present.kafka_offset) <= ({newer}.kafka_topic_id, {newer}.kafka_offset)

-- name: newer_batch
-- For rows of batches: whether the present row is of a later batch that began in the same partition. Other batches have no order.
(present.kafka_topic_id, present.kafka_partition) = ({newer}.kafka_topic_id, {newer}.kafka_partition)
    AND present.kafka_offset > {newer}.kafka_offset
