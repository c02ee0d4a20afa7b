-- Statements that apply a rewind, all in one transaction. Lock order: groups by id, the rewind, partitions by (group, topic, partition).

-- name: limits
-- Sets how long this transaction waits for a lock, and how long it may stay idle with its locks. With row_security off, a statement fails
-- if row security would hide rows from it. Locks nothing.
SELECT set_config('lock_timeout', %(lock_ms)s, true), set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true),
       set_config('row_security', 'off', true);

-- name: lock_rewind
-- Locks the rewind's row, and returns whether the plan has expired.
SELECT expires_at <= clock_timestamp() FROM tidemark.rewind WHERE rewind_id = %(rewind_id)s FOR UPDATE;

-- name: group_now
-- The group's current name and its last rewind. Locks nothing.
SELECT name, (SELECT coalesce(max(applied_no), 0) FROM tidemark.rewind JOIN tidemark.rewind_group USING (rewind_id)
               WHERE rewind_group.group_id = %(group_id)s)
  FROM tidemark.consumer_group WHERE group_id = %(group_id)s;

-- name: lock_partition
-- Locks one position. Waits for a commit in flight on it.
SELECT next_offset FROM tidemark.partition_offset
 WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s FOR NO KEY UPDATE;

-- name: position
-- Locks nothing.
SELECT next_offset FROM tidemark.partition_offset WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s;

-- name: keep_before_image
-- Stores the group's actual positions, read under the locks, and the moves that follow from them. Locks the rewind's own rows.
UPDATE tidemark.rewind_partition part
   SET old_offset = pos.next_offset, old_validated_offset = pos.validated_offset,
       new_offset = CASE WHEN hold THEN pos.next_offset ELSE new_offset END,
       superseded_from = CASE WHEN hold THEN pos.next_offset
                              WHEN %(undo_of)s::bigint IS NOT NULL THEN superseded_from
                              ELSE least(target, pos.next_offset) END
  FROM tidemark.partition_offset pos
 WHERE part.rewind_id = %(rewind_id)s
   AND pos.group_id = part.group_id AND pos.topic_id = part.topic_id AND pos.partition = part.partition
RETURNING part.group_id, part.topic_id, part.partition, part.superseded_from, part.hold;

-- name: take_from_ledger
-- Moves the failed records, batches and lost ranges from the rewind's offsets on into its archive (sql/0005_rewinds.sql). Locks
-- them; needs the positions' locks.
SELECT tidemark.take_from_ledger(%(rewind_id)s::bigint);

-- name: keep_heads
-- Adds a batch for the part that stays of each batch that the rewind cuts. Its rows and failed records are counted. The outcome of the
-- other records follows only from the whole batch: they were skipped if it had no unaccounted records, and loaded and replaced since if it
-- had neither skipped nor unaccounted records. Rows that were erased since count as loaded, in the head as in the whole.
WITH head AS (
INSERT INTO tidemark.batch (group_id, topic_id, partition, start_offset, end_offset, owner_epoch, attempt_id, loaded, skipped, retried, failed,
                            unaccounted, sink_rows, deleted, validation_id, committed_at, head_of, began_at)
SELECT whole.group_id, whole.topic_id, whole.partition, whole.start_offset, part.superseded_from, whole.owner_epoch, whole.attempt_id,
       head.loaded, CASE WHEN whole.unaccounted = 0 THEN head.rest ELSE 0 END, found.retried, found.failed,
       CASE WHEN whole.unaccounted = 0 THEN 0 ELSE head.rest END, greatest(found.sink_rows, head.loaded), found.deleted, whole.validation_id,
       whole.committed_at, whole.batch_id, whole.began_at
  FROM tidemark.rewound_batch whole
  JOIN tidemark.rewind_partition part ON part.rewind_id = whole.rewound_by AND part.group_id = whole.group_id
       AND part.topic_id = whole.topic_id AND part.partition = whole.partition
 CROSS JOIN LATERAL (
    SELECT sink.sink_rows + erased.rows AS sink_rows, sink.in_sink + erased.records AS in_sink, sink.deleted, record.*
      FROM (SELECT count(*) AS sink_rows, count(DISTINCT kafka_offset) AS in_sink, count(*) FILTER (WHERE deletes) AS deleted
              FROM (SELECT kafka_topic_id, kafka_partition, kafka_offset, false AS deletes FROM {table} loaded
                     UNION ALL
                    SELECT kafka_topic_id, kafka_partition, kafka_offset, true FROM tidemark.deletion
                     WHERE sink = ANY (%(sinks)s) AND parked_by IS NULL) written
             WHERE written.kafka_topic_id = whole.topic_id AND written.kafka_partition = whole.partition
               AND written.kafka_offset >= whole.start_offset AND written.kafka_offset < part.superseded_from
               AND NOT EXISTS (SELECT FROM tidemark.failed_record later -- rows that a retry made do not belong to the batch
                                WHERE later.group_id = whole.group_id AND later.topic_id = whole.topic_id
                                  AND later.partition = whole.partition AND later.record_offset = written.kafka_offset)) sink
     CROSS JOIN (SELECT coalesce(sum(rows), 0)::bigint AS rows, count(DISTINCT record_offset) FILTER (WHERE gone.whole) AS records
                   FROM tidemark.erased gone
                  WHERE gone.batch_id = whole.batch_id AND gone.record_offset < part.superseded_from
                    AND NOT EXISTS (SELECT FROM tidemark.failed_record later
                                     WHERE later.group_id = whole.group_id AND later.topic_id = whole.topic_id
                                       AND later.partition = whole.partition AND later.record_offset = gone.record_offset)) erased
     CROSS JOIN (SELECT count(*) FILTER (WHERE disposition = 'retry') AS retried, count(*) FILTER (WHERE disposition = 'fail') AS failed
                   FROM tidemark.failed_record record
                  WHERE record.group_id = whole.group_id AND record.topic_id = whole.topic_id AND record.partition = whole.partition
                    AND record.record_offset >= whole.start_offset AND record.record_offset < part.superseded_from) record
 ) found
 CROSS JOIN LATERAL (
    SELECT part.superseded_from - whole.start_offset - found.retried - found.failed AS others
 ) span
 CROSS JOIN LATERAL (
    SELECT CASE WHEN whole.skipped + whole.unaccounted = 0 THEN span.others ELSE found.in_sink END AS loaded,
           CASE WHEN whole.skipped + whole.unaccounted = 0 THEN 0 ELSE span.others - found.in_sink END AS rest
 ) head
 WHERE whole.rewound_by = %(rewind_id)s AND whole.group_id = %(group_id)s AND whole.start_offset < part.superseded_from
RETURNING batch_id, head_of, end_offset
)
INSERT INTO tidemark.erased (erasure_id, batch_id, record_offset, rows, whole)
SELECT erasure_id, head.batch_id, record_offset, rows, gone.whole
  FROM head JOIN tidemark.erased gone ON gone.batch_id = head.head_of WHERE record_offset < head.end_offset;

-- name: keep_lost_heads
INSERT INTO tidemark.lost_range (group_id, topic_id, partition, start_offset, end_offset, reason, attempt_id, recorded_at, rewind_id, head_of)
SELECT whole.group_id, whole.topic_id, whole.partition, whole.start_offset, part.superseded_from, whole.reason, whole.attempt_id,
       whole.recorded_at, whole.rewind_id, whole.lost_range_id
  FROM tidemark.rewound_lost_range whole
  JOIN tidemark.rewind_partition part ON part.rewind_id = whole.rewound_by AND part.group_id = whole.group_id
       AND part.topic_id = whole.topic_id AND part.partition = whole.partition
 WHERE whole.rewound_by = %(rewind_id)s AND whole.start_offset < part.superseded_from;

-- name: put_back_in_ledger
-- Undo only: reverses `take_from_ledger`, and removes the parts of cut batches.
SELECT tidemark.put_back_in_ledger(%(rewind_id)s::bigint);

-- name: record_lost
-- Stores the ranges that the group will not read, so that the ledger has no unexplained gap: ranges that a forward rewind skips, and, with
-- `allow_loss`, ranges that retention has removed from the log.
INSERT INTO tidemark.lost_range (group_id, topic_id, partition, start_offset, end_offset, reason, rewind_id)
SELECT part.group_id, part.topic_id, part.partition, ledger.ends, part.new_offset,
       CASE WHEN part.new_offset > part.target THEN 'retention' ELSE 'rewind' END, part.rewind_id
  FROM tidemark.rewind_partition part
 CROSS JOIN LATERAL (SELECT CASE WHEN %(undo_of)s::bigint IS NULL THEN part.superseded_from ELSE part.target END AS ends) ledger
 WHERE part.rewind_id = %(rewind_id)s AND NOT part.hold AND part.new_offset > ledger.ends;

-- name: move
-- Raises the epochs, so that batches read before the rewind cannot commit, and moves positions and validated offsets. Owner and generation
-- stay: the owner claims again in the same generation. A swap copies the positions of the side groups, which are where the groups are, and
-- their validated offsets. Needs the positions' locks.
WITH moved AS (
    UPDATE tidemark.partition_offset pos
       SET owner_epoch = pos.owner_epoch + 1, next_offset = coalesce(side.next_offset, part.new_offset),
           -- null without a side group: the target applies to the log as it is now
           leader_epoch = CASE WHEN part.hold THEN pos.leader_epoch ELSE side.leader_epoch END,
           committed_at = CASE WHEN part.hold THEN pos.committed_at ELSE clock_timestamp() END,
           validated_offset = CASE WHEN part.hold OR (grp.side_id IS NOT NULL AND pos.validated_offset < part.superseded_from)
                                   THEN pos.validated_offset
                                   WHEN grp.side_id IS NOT NULL THEN side.validated_offset
                                   ELSE greatest(undone.old_validated_offset, least(pos.validated_offset, part.superseded_from)) END
      FROM tidemark.rewind_partition part
      JOIN tidemark.rewind_group grp USING (rewind_id, group_id)
      LEFT JOIN tidemark.partition_offset side ON side.group_id = grp.side_id AND side.topic_id = part.topic_id
           AND side.partition = part.partition
      LEFT JOIN tidemark.rewind_partition undone ON undone.rewind_id = %(undo_of)s AND undone.group_id = part.group_id
           AND undone.topic_id = part.topic_id AND undone.partition = part.partition
     WHERE part.rewind_id = %(rewind_id)s
       AND pos.group_id = part.group_id AND pos.topic_id = part.topic_id AND pos.partition = part.partition
    RETURNING pos.group_id, pos.topic_id, pos.partition, pos.owner_epoch
)
UPDATE tidemark.rewind_partition part SET owner_epoch = moved.owner_epoch
  FROM moved
 WHERE part.rewind_id = %(rewind_id)s
   AND moved.group_id = part.group_id AND moved.topic_id = part.topic_id AND moved.partition = part.partition;

-- name: mark_undone
UPDATE tidemark.rewind SET state = 'UNDONE' WHERE rewind_id = %(undo_of)s AND state = 'APPLIED';

-- name: mark_applied
UPDATE tidemark.rewind
   SET state = 'APPLIED', hold_until = NULL, applied_by = %(by)s, applied_at = clock_timestamp(), applied_no = nextval('tidemark.rewind_applied'),
       decided_by = coalesce(decided_by, %(approved_by)s),
       decided_at = coalesce(decided_at, CASE WHEN %(approved_by)s::text IS NOT NULL THEN clock_timestamp() END)
 WHERE rewind_id = %(rewind_id)s;

