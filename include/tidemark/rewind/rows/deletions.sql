-- Statements that park deletions of an upsert sink, and restore them. They need the positions' locks, so that nothing writes these rows
-- meanwhile.

-- name: park
-- Parks the deletions by records at or after the point of a rewind. Locks them.
UPDATE tidemark.deletion SET parked_by = %(rewind_id)s
  FROM tidemark.rewind_partition part
 WHERE part.rewind_id = %(rewind_id)s AND part.group_id = %(group_id)s AND NOT part.hold
   AND deletion.sink = %(sink)s AND deletion.parked_by IS NULL AND deletion.kafka_topic_id = part.topic_id
   AND deletion.kafka_partition = part.partition AND deletion.kafka_offset >= part.superseded_from;

-- name: any
-- Whether a rewind has parked deletions. Locks nothing.
SELECT EXISTS (SELECT FROM tidemark.deletion WHERE parked_by = %(rewind_id)s AND sink = %(sink)s);

-- name: shapes
-- The column lists of the deleted rows; several if the table was changed meanwhile. Locks nothing.
SELECT DISTINCT ARRAY(SELECT name FROM jsonb_object_keys(kept) name ORDER BY name COLLATE "C")
  FROM tidemark.deletion WHERE parked_by = %(rewind_id)s AND sink = %(sink)s AND kept IS NOT NULL;

-- name: return
-- Puts back the rows from before the point whose deletion was parked, unless an earlier deletion is still in force or the sink has the key.
-- Returns the numbers of rows to put back, of inserted rows, and of inserted rows that arrived unchanged.
WITH candidate AS (
    SELECT DISTINCT ON (newer.digest, newer.kafka_topic_id, newer.kafka_partition) newer.deletion_id, newer.kept
      FROM tidemark.deletion newer
      JOIN tidemark.rewind_partition part ON part.topic_id = newer.kafka_topic_id AND part.partition = newer.kafka_partition
     WHERE newer.parked_by = {rewind_id} AND newer.sink = {sink_name} AND newer.kept IS NOT NULL
       AND part.rewind_id = {rewind_id} AND part.group_id = {group_id}
       AND (newer.kept_topic_id <> newer.kafka_topic_id OR newer.kept_offset < part.superseded_from)
     ORDER BY newer.digest, newer.kafka_topic_id, newer.kafka_partition, newer.kept_topic_id DESC, newer.kept_offset DESC
), winner AS MATERIALIZED (
    SELECT deletion_id, newer.kept
      FROM (SELECT deletion_id, digest, kept.kept, kept_topic_id AS kafka_topic_id, kafka_partition, kept_offset AS kafka_offset,
                   (kept.kept ->> 'kafka_seq')::integer AS kafka_seq
              FROM candidate JOIN tidemark.deletion kept USING (deletion_id)) newer
     WHERE ARRAY(SELECT name FROM jsonb_object_keys(newer.kept) name ORDER BY name COLLATE "C") = {shape}::text[]
       AND NOT EXISTS (SELECT FROM {sink} present WHERE {same_key})
       AND {first_after} IS NULL
), moved AS (
    UPDATE tidemark.deletion SET kept = NULL, kept_topic_id = NULL, kept_offset = NULL FROM winner
     WHERE deletion.deletion_id = winner.deletion_id
), back AS (
    INSERT INTO {sink} ({columns}) OVERRIDING SYSTEM VALUE SELECT {values} FROM winner newer
    RETURNING {came}
)
SELECT (SELECT count(*) FROM winner), (SELECT count(*) FROM back),
       (SELECT count(*) FROM (SELECT * FROM back INTERSECT ALL SELECT {was} FROM winner newer) alike); -- a join might become a nested loop

-- name: unmark
-- Removes the mark from rows whose deletion was parked and that no deletion in force follows. Locks them.
UPDATE {sink} newer SET kafka_deleted = false
  FROM tidemark.deletion gone
 WHERE gone.parked_by = {rewind_id} AND gone.sink = {sink_name} AND {same_key} AND newer.kafka_deleted AND {first_after} IS NULL;

-- name: bury
-- Moves the rows before a restored deletion out of the sink. A row that was overwritten before the deletion is kept under the undo. Locks
-- them.
WITH target AS MATERIALIZED (
    SELECT DISTINCT newer.ctid FROM tidemark.deletion gone JOIN {sink} newer ON {same_key} WHERE gone.parked_by = {undo_of} AND gone.sink = {sink_name}
), gone AS (
    DELETE FROM {sink} newer USING target WHERE newer.ctid = target.ctid AND {first_after} IS NOT NULL RETURNING newer.*
), dying AS (
    SELECT newer.*, {first_after} AS first_after FROM gone newer
), kept AS (
    {keep} RETURNING newer.first_after
)
INSERT INTO tidemark.rewound_row (rewind_id, group_id, topic_id, partition, sink, elsewhere,
                                  kafka_topic_id, kafka_partition, kafka_offset, kafka_seq, kept)
SELECT {rewind_id}, {group_id}, later.kafka_topic_id, later.kafka_partition, {sink_name}, false,
       newer.kafka_topic_id, newer.kafka_partition, newer.kafka_offset, newer.kafka_seq, jsonb_object({names}, {values})
  FROM dying newer JOIN tidemark.deletion later ON later.deletion_id = newer.first_after
 WHERE newer.first_after NOT IN (SELECT first_after FROM kept);

-- name: in_the_way
-- Counts the rows that should have been moved and are still in the sink. Locks nothing.
SELECT count(DISTINCT newer.ctid) FROM tidemark.deletion gone JOIN {sink} newer ON {same_key}
 WHERE gone.parked_by = {undo_of} AND gone.sink = {sink_name} AND {first_after} IS NOT NULL;

-- name: mark
-- Marks the rows before a restored deletion as deleted. Locks them.
UPDATE {sink} newer SET kafka_deleted = true
  FROM tidemark.deletion gone
 WHERE gone.parked_by = {undo_of} AND gone.sink = {sink_name} AND {same_key} AND NOT newer.kafka_deleted AND {first_after} IS NOT NULL;

-- name: unpark
-- Restores the deletions that the undone rewind parked. Locks them.
UPDATE tidemark.deletion SET parked_by = NULL WHERE parked_by = %(undo_of)s AND sink = %(sink)s;
