-- Statements of the view of one group. They lock nothing.

-- name: group_id
SELECT group_id, clock_timestamp() AS now FROM tidemark.consumer_group WHERE name = %(group)s;

-- name: lost
-- The newest lost ranges of a group. Retry topics are omitted: their records are in Postgres.
SELECT topic.name AS topic, partition, start_offset, end_offset, reason, recorded_at
  FROM tidemark.lost_range JOIN tidemark.partition_offset USING (group_id, topic_id, partition) JOIN tidemark.topic USING (topic_id)
 WHERE group_id = %(group_id)s AND NOT drained ORDER BY lost_range_id DESC LIMIT %(limit)s;

-- name: pauses
SELECT topic, partition, paused, priority, max_ahead::text AS max_ahead, reason, changed_by, changed_at
  FROM tidemark.flow WHERE group_id = %(group_id)s ORDER BY topic NULLS FIRST, partition NULLS FIRST;

-- name: attempts
-- The newest attempts of a group, with what they committed.
SELECT attempt.attempt_id, dag_id, run_id, task_id, map_index, try_number, state, error ->> 'kind' AS error_kind,
       error ->> 'type' AS error, error ->> 'text' AS error_text, started_at, ended_at, of_rewind,
       made.batches, made.loaded, made.deleted, made.retried, made.failed
  FROM (SELECT * FROM tidemark.attempt WHERE group_id = %(group_id)s ORDER BY attempt_id DESC LIMIT %(limit)s) attempt
 CROSS JOIN LATERAL (SELECT count(*) AS batches, coalesce(sum(loaded), 0)::bigint AS loaded, coalesce(sum(deleted), 0)::bigint AS deleted,
                            coalesce(sum(retried), 0)::bigint AS retried, coalesce(sum(failed), 0)::bigint AS failed
                       FROM tidemark.batch WHERE batch.attempt_id = attempt.attempt_id) made
 ORDER BY attempt.attempt_id DESC;

-- name: batches
-- The newest batches of these attempts, without those that a replay beside has read.
SELECT batch_id, attempt_id, topic.name AS topic, partition, start_offset, end_offset, loaded, skipped, retried, failed, unaccounted,
       batch.sink_rows, batch.deleted, drained, committed_at, validation.verdict
  FROM tidemark.batch JOIN tidemark.topic USING (topic_id) LEFT JOIN tidemark.validation USING (validation_id)
 WHERE batch.group_id = %(group_id)s AND attempt_id = ANY (%(attempt_ids)s::bigint[]) ORDER BY batch_id DESC LIMIT %(limit)s;

-- name: failing
-- The critical expectations that a validation has failed.
SELECT DISTINCT expectation FROM tidemark.validation_result
 WHERE validation_id = %(validation_id)s AND NOT success AND severity = 'critical' ORDER BY expectation;

-- name: rewinds
-- The rewinds of a group that were applied within a period.
SELECT rewind_id, applied_at AS at FROM tidemark.rewind JOIN tidemark.rewind_group USING (rewind_id)
 WHERE group_name = %(group)s AND applied_at >= clock_timestamp() - %(period)s ORDER BY rewind_id;

-- name: rebalances
-- The generations of a group that are stored, newest first.
SELECT generation, at, reason, protocol, assignment FROM tidemark.rebalance WHERE group_id = %(group_id)s ORDER BY generation DESC;
