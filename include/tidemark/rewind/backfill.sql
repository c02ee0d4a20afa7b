-- Statements on backfills: the ranges that a forward rewind skipped, and the progress of backfill runs. A part is one partition of one
-- rewind. Its lock is the side group's position, which is taken after the positions of the groups themselves.

-- name: parts
-- The parts of a group's backfills, or of some rewinds': position and end. Locks nothing.
SELECT fill.rewind_id, fill.group_id, grp.name AS group, fill.side_id, side.name AS side, topic.name AS topic, topic.kafka_uuid,
       fill.topic_id, fill.partition, fill.start_offset AS start, pos.next_offset AS position, fill.end_offset AS end,
       part.new_offset AS skipped_to
  FROM tidemark.backfill fill
  JOIN tidemark.rewind_partition part USING (rewind_id, group_id, topic_id, partition)
  JOIN tidemark.consumer_group grp USING (group_id)
  JOIN tidemark.consumer_group side ON side.group_id = fill.side_id
  JOIN tidemark.topic USING (topic_id)
  JOIN tidemark.partition_offset pos ON pos.group_id = fill.side_id AND pos.topic_id = fill.topic_id AND pos.partition = fill.partition
 WHERE (%(group)s::text IS NULL OR grp.name = %(group)s) AND (%(rewind_ids)s::bigint[] IS NULL OR rewind_id = ANY (%(rewind_ids)s::bigint[]))
 ORDER BY fill.rewind_id, fill.group_id, topic.name, fill.topic_id, fill.partition;

-- name: end_now
SELECT end_offset FROM tidemark.backfill
 WHERE rewind_id = %(rewind_id)s AND group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s;

-- name: to_lock
-- The positions of the backfills whose ends a rewind may lower or restore, in lock order. Locks nothing.
SELECT fill.side_id AS group_id, fill.topic_id, topic.name AS topic, fill.partition
  FROM tidemark.rewind_partition part
  JOIN tidemark.backfill fill USING (group_id, topic_id, partition)
  JOIN tidemark.topic USING (topic_id)
  JOIN tidemark.partition_offset pos ON pos.group_id = fill.side_id AND pos.topic_id = fill.topic_id AND pos.partition = fill.partition
 WHERE part.rewind_id = %(rewind_id)s AND NOT part.hold
   AND (pos.next_offset < fill.end_offset
        OR EXISTS (SELECT FROM tidemark.backfill_cut cut
                    WHERE cut.cut_by = %(undo_of)s::bigint AND cut.rewind_id = fill.rewind_id AND cut.group_id = fill.group_id
                      AND cut.topic_id = fill.topic_id AND cut.partition = fill.partition))
 ORDER BY fill.side_id, fill.topic_id, fill.partition;

-- name: cut
-- Lowers the end of a backfill to the rewind's target, because the group reads the rest itself, and fences the backfill's runs. Needs the
-- positions' locks.
WITH nearer AS (
    SELECT fill.*, greatest(fill.start_offset, part.superseded_from) AS new_end
      FROM tidemark.rewind_partition part
      JOIN tidemark.backfill fill USING (group_id, topic_id, partition)
      JOIN tidemark.partition_offset pos ON pos.group_id = fill.side_id AND pos.topic_id = fill.topic_id AND pos.partition = fill.partition
     WHERE part.rewind_id = %(rewind_id)s AND NOT part.hold
       AND part.superseded_from < fill.end_offset AND pos.next_offset < fill.end_offset
), noted AS (
    INSERT INTO tidemark.backfill_cut (cut_by, rewind_id, group_id, topic_id, partition, end_offset)
    SELECT %(rewind_id)s, rewind_id, group_id, topic_id, partition, end_offset FROM nearer
), drawn AS (
    UPDATE tidemark.backfill fill SET end_offset = new_end FROM nearer
     WHERE fill.rewind_id = nearer.rewind_id AND fill.group_id = nearer.group_id
       AND fill.topic_id = nearer.topic_id AND fill.partition = nearer.partition
)
UPDATE tidemark.partition_offset pos SET owner_epoch = owner_epoch + 1 FROM nearer
 WHERE pos.group_id = nearer.side_id AND pos.topic_id = nearer.topic_id AND pos.partition = nearer.partition;

-- name: give_back
-- Undo only: restores the ends that the undone rewind lowered. Needs the positions' locks.
WITH back AS (
    UPDATE tidemark.backfill_cut SET given_back_by = %(rewind_id)s WHERE cut_by = %(undo_of)s RETURNING *
), longer AS (
    UPDATE tidemark.backfill fill SET end_offset = back.end_offset FROM back
     WHERE fill.rewind_id = back.rewind_id AND fill.group_id = back.group_id
       AND fill.topic_id = back.topic_id AND fill.partition = back.partition
    RETURNING fill.*
)
UPDATE tidemark.partition_offset pos SET owner_epoch = owner_epoch + 1 FROM longer
 WHERE pos.group_id = longer.side_id AND pos.topic_id = longer.topic_id AND pos.partition = longer.partition;

-- name: shorten_put_back
-- Undo only: shortens a lost range that has come back if a backfill has read its head meanwhile.
WITH read AS (
    SELECT lost_range_id, lost.end_offset, pos.next_offset
      FROM tidemark.rewind_partition part
      JOIN tidemark.backfill fill USING (group_id, topic_id, partition)
      JOIN tidemark.partition_offset pos ON pos.group_id = fill.side_id AND pos.topic_id = fill.topic_id AND pos.partition = fill.partition
      JOIN tidemark.lost_range lost ON lost.group_id = fill.group_id AND lost.topic_id = fill.topic_id AND lost.partition = fill.partition
           AND lost.rewind_id = fill.rewind_id AND lost.reason = 'rewind'
     WHERE part.rewind_id = %(rewind_id)s AND NOT part.hold AND lost.start_offset < pos.next_offset
), gone AS (
    DELETE FROM tidemark.lost_range lost USING read WHERE lost.lost_range_id = read.lost_range_id AND read.end_offset <= next_offset
)
UPDATE tidemark.lost_range lost SET start_offset = next_offset FROM read
 WHERE lost.lost_range_id = read.lost_range_id AND read.end_offset > next_offset;

-- name: make
-- Creates one side group per group, with positions at the starts of the ranges that this rewind skipped.
WITH skipped AS MATERIALIZED (
    SELECT * FROM tidemark.lost_range WHERE rewind_id = %(rewind_id)s AND reason = 'rewind' AND head_of IS NULL
), side AS (
    INSERT INTO tidemark.consumer_group (name, state, side_of)
    SELECT name || ' (backfill of rewind ' || %(rewind_id)s || ')', 'Dead', group_id
      FROM tidemark.consumer_group WHERE group_id IN (SELECT group_id FROM skipped)
    RETURNING group_id, side_of
), placed AS (
    INSERT INTO tidemark.partition_offset (group_id, topic_id, partition, next_offset, validated_offset)
    SELECT side.group_id, topic_id, partition, start_offset, start_offset FROM skipped JOIN side ON side_of = skipped.group_id
)
INSERT INTO tidemark.backfill (rewind_id, group_id, topic_id, partition, side_id, start_offset, end_offset)
SELECT rewind_id, skipped.group_id, topic_id, partition, side.group_id, start_offset, end_offset
  FROM skipped JOIN side ON side_of = skipped.group_id;
