-- Statements on replays beside: side groups, their shadows and their positions. A shadow is an archive that a replay writes.

-- name: make_sides
-- Creates a side group for each group of a rewind, with positions where the rewind goes, and stores what retention has removed before them.
WITH side AS (
    INSERT INTO tidemark.consumer_group (name, state, side_of)
    SELECT grp.name || ' (beside, rewind ' || %(rewind_id)s || ')', 'Dead', group_id
      FROM tidemark.rewind_group JOIN tidemark.consumer_group grp USING (group_id) WHERE rewind_id = %(rewind_id)s
    RETURNING group_id, side_of
), noted AS (
    UPDATE tidemark.rewind_group SET side_id = side.group_id FROM side
     WHERE rewind_id = %(rewind_id)s AND rewind_group.group_id = side.side_of
), placed AS (
    INSERT INTO tidemark.partition_offset (group_id, topic_id, partition, next_offset, validated_offset)
    SELECT side.group_id, topic_id, partition, new_offset, new_offset
      FROM tidemark.rewind_partition part JOIN side ON side_of = part.group_id WHERE rewind_id = %(rewind_id)s AND NOT hold
)
INSERT INTO tidemark.lost_range (group_id, topic_id, partition, start_offset, end_offset, reason, rewind_id)
SELECT side.group_id, topic_id, partition, target, new_offset, 'retention', rewind_id
  FROM tidemark.rewind_partition part JOIN side ON side_of = part.group_id
 WHERE rewind_id = %(rewind_id)s AND NOT hold AND new_offset > target;

-- name: make_shadow
-- A table with the sink's columns, defaults, constraints and indexes. Locks the sink only against changes of its columns.
CREATE TABLE {shadow} (LIKE {table} INCLUDING ALL EXCLUDING COMMENTS EXCLUDING STATISTICS);
ALTER TABLE {shadow} REPLICA IDENTITY FULL;

-- name: writers
-- The roles that may write to the sink, and what they may do. Locks nothing.
SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END, string_agg(DISTINCT privilege_type, ', ')
  FROM pg_class, aclexplode(coalesce(relacl, acldefault('r', relowner)))
 WHERE pg_class.oid = to_regclass(%(table)s) AND privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
 GROUP BY grantee HAVING bool_or(privilege_type = 'INSERT');

-- name: grant
GRANT {rights} ON {shadow} TO {role};

-- name: add_shadow
INSERT INTO tidemark.rewind_archive (rewind_id, number, group_id, sink, relation, table_partition, rows, shadow)
VALUES (%(rewind_id)s, %(number)s, %(group_id)s, %(sink)s, %(relation)s, false, 0, true);

-- name: mark_started
UPDATE tidemark.rewind
   SET state = 'BESIDE', started_by = %(by)s, started_at = clock_timestamp(),
       decided_by = coalesce(decided_by, %(approved_by)s),
       decided_at = coalesce(decided_at, CASE WHEN %(approved_by)s::text IS NOT NULL THEN clock_timestamp() END)
 WHERE rewind_id = %(rewind_id)s;

-- name: parts
-- The partitions of a replay beside: where it began, where it is, and where its group is. Locks nothing.
SELECT rewind.rewind_id, rewind.transform, member.consumer, grp.name AS group, grp.group_id, side.name AS side, side.group_id AS side_id,
       topic.name AS topic, topic.kafka_uuid, part.topic_id, part.partition, part.new_offset AS start, at.next_offset AS position,
       pos.next_offset AS end
  FROM tidemark.rewind
  JOIN tidemark.rewind_group member USING (rewind_id)
  JOIN tidemark.rewind_partition part USING (rewind_id, group_id)
  JOIN tidemark.consumer_group grp USING (group_id)
  JOIN tidemark.topic USING (topic_id)
  JOIN tidemark.consumer_group side ON side.group_id = member.side_id
  JOIN tidemark.partition_offset at ON at.group_id = side.group_id AND at.topic_id = part.topic_id AND at.partition = part.partition
  JOIN tidemark.partition_offset pos ON pos.group_id = grp.group_id AND pos.topic_id = part.topic_id AND pos.partition = part.partition
 WHERE rewind.state = 'BESIDE' AND NOT part.hold AND (%(rewind_id)s::bigint IS NULL OR rewind_id = %(rewind_id)s)
   AND (%(group)s::text IS NULL OR grp.name = %(group)s)
 ORDER BY rewind_id, part.group_id, topic.name, part.topic_id, part.partition;

-- name: shadows
-- The shadows of a rewind that are still there, or those of one of its groups. Locks nothing.
SELECT rewind_id, number, sink FROM tidemark.rewind_archive
 WHERE rewind_id = %(rewind_id)s AND (%(group_id)s::integer IS NULL OR group_id = %(group_id)s)
   AND shadow AND put_back_at IS NULL AND removed_at IS NULL ORDER BY number;

-- name: running
-- Rewinds of these groups with a replay beside that is neither swapped nor discarded. Locks nothing.
SELECT DISTINCT rewind_id FROM tidemark.rewind JOIN tidemark.rewind_group USING (rewind_id)
 WHERE state = 'BESIDE' AND group_id = ANY (%(group_ids)s::integer[]) ORDER BY rewind_id;

-- name: missing_columns
-- Columns with these names that a sink has got since its shadow was made, with type and default. Locks nothing.
SELECT now.attname, format_type(now.atttypid, now.atttypmod) || coalesce(' DEFAULT ' || pg_get_expr(adbin, adrelid), '')
  FROM pg_attribute now LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
 WHERE now.attrelid = to_regclass(%(table)s) AND now.attname = ANY (%(names)s) AND now.attgenerated = '' AND now.attidentity = ''
   AND NOT EXISTS (SELECT FROM pg_attribute had WHERE had.attrelid = to_regclass(%(shadow)s) AND had.attname = now.attname AND NOT had.attisdropped)
 ORDER BY now.attnum;

-- name: hold
-- Holds the groups of a replay for a while, or ends the hold. Locks the rewind's row.
UPDATE tidemark.rewind SET hold_until = clock_timestamp() + %(hold)s WHERE rewind_id = %(rewind_id)s AND state = 'BESIDE';

-- name: sides
-- The side groups of a rewind, in lock order. Locks nothing.
SELECT side_id FROM tidemark.rewind_group WHERE rewind_id = %(rewind_id)s AND side_id IS NOT NULL ORDER BY side_id;

-- name: to_lock
-- The positions of the side groups of a rewind, in lock order. Locks nothing.
SELECT pos.group_id, pos.topic_id, topic.name AS topic, pos.partition
  FROM tidemark.rewind_group grp JOIN tidemark.partition_offset pos ON pos.group_id = grp.side_id JOIN tidemark.topic USING (topic_id)
 WHERE rewind_id = %(rewind_id)s ORDER BY pos.group_id, pos.topic_id, pos.partition;

-- name: count_rows
-- Stores the number of rows in a shadow. Needs the positions' locks.
UPDATE tidemark.rewind_archive SET rows = (SELECT count(*) FROM {shadow}) WHERE rewind_id = %(rewind_id)s AND number = %(number)s;

-- name: other_partition
-- A key that the replay has read in another partition than the row that is in the sink. Rows of whole batches may be of any partition that
-- moves. Locks nothing.
SELECT {values}, topic.name, present.kafka_partition
  FROM {shadow} newer JOIN {table} present ON {same_key} JOIN tidemark.topic ON topic_id = present.kafka_topic_id
 WHERE NOT ({same_partition})
   AND NOT (EXISTS (SELECT FROM tidemark.rewind_group grp JOIN tidemark.batch ON batch.group_id = grp.side_id
                     WHERE grp.rewind_id = {rewind_id} AND grp.group_id = {group_id} AND whole_batch_id IS NOT NULL)
            AND EXISTS (SELECT FROM tidemark.rewind_partition part JOIN tidemark.topic now USING (topic_id)
                         WHERE part.rewind_id = {rewind_id} AND part.group_id = {group_id} AND NOT part.hold
                           AND now.name = topic.name AND part.partition = present.kafka_partition))
 LIMIT 1;

-- name: take_deletions
-- Makes the deletions of a shadow deletions of the sink, parked until its rows before them are out of the sink. Locks them.
UPDATE tidemark.deletion SET sink = %(sink)s, parked_by = %(parked_by)s WHERE sink = %(shadow)s;

-- name: take_ledger
SELECT tidemark.take_over_side(%(rewind_id)s::bigint);

-- name: fence
-- Raises the epochs of the side groups, so that no run of the replay commits any more. Locks their positions, in order.
UPDATE tidemark.partition_offset pos SET owner_epoch = pos.owner_epoch + 1
  FROM (SELECT at.group_id, at.topic_id, at.partition
          FROM tidemark.rewind_group grp JOIN tidemark.partition_offset at ON at.group_id = grp.side_id
         WHERE grp.rewind_id = %(rewind_id)s ORDER BY at.group_id, at.topic_id, at.partition FOR NO KEY UPDATE OF at) locked
 WHERE pos.group_id = locked.group_id AND pos.topic_id = locked.topic_id AND pos.partition = locked.partition;

-- name: discard_ledger
SELECT tidemark.discard_side(%(rewind_id)s::bigint);

-- name: discard_deletions
DELETE FROM tidemark.deletion WHERE sink = %(shadow)s;

-- name: mark_removed
UPDATE tidemark.rewind_archive SET removed_at = clock_timestamp() WHERE rewind_id = %(rewind_id)s AND shadow;

-- name: mark_discarded
UPDATE tidemark.rewind SET state = 'DISCARDED', hold_until = NULL WHERE rewind_id = %(rewind_id)s;

-- name: overdue
-- Replays beside that began longer ago than %(keep)s. Locks nothing.
SELECT rewind_id FROM tidemark.rewind WHERE state = 'BESIDE' AND started_at < clock_timestamp() - %(keep)s ORDER BY rewind_id;
