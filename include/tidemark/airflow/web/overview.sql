-- Statements of the page's first view. They lock nothing.

-- name: groups
-- What there is to say of each of these groups. ``stopped_by``: the critical validation before whose rows the validated view stops;
-- ``unvalidated``: it stops before rows without a verdict. Counts of records stop at %(most)s. The last commit is as of the last sample, if there is one.
SELECT grp.name AS "group",
       coalesce(lag.partitions, pos.partitions, 0) AS partitions, coalesce(lag.committed_at, pos.committed_at) AS committed_at,
       (SELECT count(*) FROM (SELECT FROM tidemark.failed_record
                               WHERE group_id = grp.group_id AND state IN ('WAITING', 'HELD') LIMIT %(most)s) seen) AS waiting,
       (SELECT count(*) FROM (SELECT FROM tidemark.failed_record
                               WHERE group_id = grp.group_id AND state = 'FAILED' LIMIT %(most)s) seen) AS failed,
       flow.paused, flow.reason AS pause_reason,
       attempt.attempt_id, attempt.state AS attempt_state, attempt.error ->> 'type' AS attempt_error, attempt.started_at, attempt.ended_at,
       attempt.dag_id, attempt.run_id,
       validation.validation_id, validation.verdict, view.stopped_by, view.unvalidated
  FROM tidemark.consumer_group grp
  LEFT JOIN tidemark.lag_group lag USING (group_id)
  LEFT JOIN LATERAL (SELECT count(*) AS partitions, max(committed_at) AS committed_at
                       FROM tidemark.partition_offset WHERE lag.group_id IS NULL AND group_id = grp.group_id AND NOT drained) pos ON true
  LEFT JOIN LATERAL (SELECT true AS paused, reason FROM tidemark.flow
                      WHERE group_id = grp.group_id AND flow.paused ORDER BY topic NULLS FIRST, partition NULLS FIRST LIMIT 1) flow ON true
  LEFT JOIN LATERAL (SELECT * FROM tidemark.attempt
                      WHERE group_id = grp.group_id AND backfill_of IS NULL AND dag_id IS DISTINCT FROM %(drain)s
                      ORDER BY attempt_id DESC LIMIT 1) attempt ON true
  LEFT JOIN LATERAL (SELECT * FROM tidemark.validation
                      WHERE group_id = grp.group_id
                        AND EXISTS (SELECT FROM tidemark.batch WHERE batch.validation_id = validation.validation_id)
                      ORDER BY validation_id DESC LIMIT 1) validation ON true
 CROSS JOIN LATERAL (SELECT min(validation_id) FILTER (WHERE verdict = 'critical') AS stopped_by,
                            coalesce(bool_or(verdict IS NULL), false) AS unvalidated
                       FROM tidemark.partition_offset position
                      CROSS JOIN LATERAL (SELECT validation_id, verdict, state
                                            FROM tidemark.batch JOIN tidemark.attempt USING (attempt_id)
                                            LEFT JOIN tidemark.validation USING (validation_id)
                                           WHERE batch.group_id = position.group_id AND batch.topic_id = position.topic_id
                                             AND batch.partition = position.partition AND batch.start_offset <= position.validated_offset
                                             AND batch.end_offset > position.validated_offset
                                           ORDER BY batch.start_offset DESC LIMIT 1) first
                      WHERE position.group_id = grp.group_id AND NOT drained AND validated_offset < next_offset
                        AND (verdict IS NOT NULL OR state <> 'RUNNING')) view
 WHERE grp.name = ANY (%(groups)s);

-- name: trends
-- The lag of each group in steps of five minutes, oldest first.
SELECT grp.name AS "group", array_agg(steps.records ORDER BY at) AS records
  FROM (SELECT group_id, at, sum(lag)::bigint AS records FROM tidemark.lag_history
         WHERE step_s = 300 AND at >= (SELECT clock_timestamp()) - %(period)s GROUP BY group_id, at) steps
  JOIN tidemark.consumer_group grp USING (group_id)
 WHERE grp.name = ANY (%(groups)s) GROUP BY grp.name;
