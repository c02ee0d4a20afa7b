-- Statements of the metrics process. They lock nothing, and read only changed or pending rows, never a whole history.

-- name: newest
-- The start of counting: all earlier commits are known.
SELECT coalesce(max(batch_id), 0) - 10000 AS batch_id, clock_timestamp() AS now FROM tidemark.batch;

-- name: batches
-- Batches after a given one, without those that a rewind has cut from others, with which they were counted.
SELECT batch_id, grp.name AS group, committed_at, extract(epoch FROM committed_at - began_at)::double precision AS seconds,
       loaded, skipped, retried, failed, unaccounted, sink_rows, deleted
  FROM tidemark.batch JOIN tidemark.consumer_group owner USING (group_id)
  JOIN tidemark.consumer_group grp ON grp.group_id = coalesce(owner.side_of, owner.group_id)
 WHERE batch_id > %(after)s AND head_of IS NULL;

-- name: attempts
-- Attempts that ended since a time. ``kind``: of the error; null: the attempt committed.
SELECT attempt_id, grp.name AS group, ended_at, error ->> 'kind' AS kind
  FROM tidemark.attempt JOIN tidemark.consumer_group owner USING (group_id)
  JOIN tidemark.consumer_group grp ON grp.group_id = coalesce(owner.side_of, owner.group_id)
 WHERE ended_at > %(since)s;

-- name: unsettled
-- Failed records that are not settled, by group and state.
SELECT grp.name AS group, record.state, count(*) AS records
  FROM tidemark.failed_record record JOIN tidemark.consumer_group grp USING (group_id)
 WHERE record.state IN ('WAITING', 'HELD', 'FAILED') GROUP BY grp.name, record.state;

-- name: due
-- The oldest due record of each group with waiting records; ``late_s`` is negative if it is not due yet.
SELECT grp.name AS group, extract(epoch FROM clock_timestamp() - oldest.due_at)::double precision AS late_s
  FROM tidemark.consumer_group grp CROSS JOIN LATERAL (
      SELECT due_at FROM tidemark.failed_record record WHERE record.group_id = grp.group_id AND record.state = 'WAITING' ORDER BY due_at LIMIT 1
  ) oldest;

-- name: lost
-- Records that were lost, by group; a range of a topic that is gone has no known end. A rewind's skipped ranges are not lost, nor are
-- messages of retry topics.
SELECT grp.name AS group, sum(coalesce(end_offset - start_offset, 0))::bigint AS records
  FROM tidemark.lost_range JOIN tidemark.partition_offset USING (group_id, topic_id, partition) JOIN tidemark.consumer_group grp USING (group_id)
 WHERE reason <> 'rewind' AND NOT drained GROUP BY grp.name;

-- name: rewinds
-- Rewinds of each group that were applied, undone or not.
SELECT grp.name AS group, count(*) AS rewinds
  FROM tidemark.rewind_group JOIN tidemark.rewind USING (rewind_id) JOIN tidemark.consumer_group grp USING (group_id)
 WHERE rewind.state IN ('APPLIED', 'UNDONE') GROUP BY grp.name;

-- name: validations
-- The last validation of each group.
SELECT grp.name AS group, last.verdict, last.validated_at
  FROM tidemark.consumer_group grp CROSS JOIN LATERAL (
      SELECT verdict, validated_at FROM tidemark.validation WHERE validation.group_id = grp.group_id ORDER BY validation_id DESC LIMIT 1
  ) last;
