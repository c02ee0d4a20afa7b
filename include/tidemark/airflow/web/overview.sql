-- Statements of the page's first view. They lock nothing.

-- name: groups
-- What there is to say of each of these groups. Counts of records stop at %(most)s.
SELECT grp.name AS "group", grp.state, grp.state_since, grp.generation, clock_timestamp() AS now,
       (SELECT count(*) FROM tidemark.group_member WHERE group_id = grp.group_id AND NOT pending) AS members,
       pos.partitions, pos.committed_at, pos.position, pos.validated,
       (SELECT count(*) FROM (SELECT FROM tidemark.failed_record
                               WHERE group_id = grp.group_id AND state IN ('WAITING', 'HELD') LIMIT %(most)s) seen) AS waiting,
       (SELECT count(*) FROM (SELECT FROM tidemark.failed_record
                               WHERE group_id = grp.group_id AND state = 'FAILED' LIMIT %(most)s) seen) AS failed,
       (SELECT count(*) FROM tidemark.lost_range WHERE group_id = grp.group_id AND reason <> 'rewind') AS lost_ranges,
       flow.paused, flow.reason AS pause_reason,
       attempt.attempt_id, attempt.state AS attempt_state, attempt.error ->> 'type' AS attempt_error, attempt.started_at, attempt.ended_at,
       attempt.dag_id, attempt.run_id,
       validation.validation_id, validation.verdict, validation.validated_at
  FROM tidemark.consumer_group grp
 CROSS JOIN LATERAL (SELECT count(*) AS partitions, max(committed_at) AS committed_at, sum(next_offset)::bigint AS position,
                            sum(validated_offset)::bigint AS validated
                       FROM tidemark.partition_offset WHERE group_id = grp.group_id AND NOT drained) pos
  LEFT JOIN LATERAL (SELECT true AS paused, reason FROM tidemark.flow
                      WHERE group_id = grp.group_id AND flow.paused ORDER BY topic NULLS FIRST, partition NULLS FIRST LIMIT 1) flow ON true
  LEFT JOIN LATERAL (SELECT * FROM tidemark.attempt
                      WHERE group_id = grp.group_id AND backfill_of IS NULL AND dag_id IS DISTINCT FROM %(drain)s
                      ORDER BY attempt_id DESC LIMIT 1) attempt ON true
  LEFT JOIN LATERAL (SELECT * FROM tidemark.validation WHERE group_id = grp.group_id ORDER BY validation_id DESC LIMIT 1) validation ON true
 WHERE grp.name = ANY (%(groups)s);

-- name: trends
-- The lag of each group in steps of five minutes, oldest first.
SELECT "group", array_agg(at ORDER BY at) AS at, array_agg(records ORDER BY at) AS records
  FROM (SELECT grp.name AS "group", at, sum(lag)::bigint AS records
          FROM tidemark.lag_history JOIN tidemark.consumer_group grp USING (group_id)
         WHERE grp.name = ANY (%(groups)s) AND step_s = 300 AND at >= clock_timestamp() - %(period)s
         GROUP BY grp.name, at) steps
 GROUP BY "group";

-- name: replaying
-- Groups with partitions that have not yet reached again the position from which their last rewind moved them.
SELECT grp.name AS "group", count(*) AS partitions
  FROM (SELECT DISTINCT ON (part.group_id, part.topic_id, part.partition) part.*
          FROM tidemark.rewind_partition part JOIN tidemark.rewind USING (rewind_id) JOIN tidemark.consumer_group wanted USING (group_id)
         WHERE wanted.name = ANY (%(groups)s) AND rewind.state = 'APPLIED' AND NOT part.hold
         ORDER BY part.group_id, part.topic_id, part.partition, rewind.applied_no DESC) last
  JOIN tidemark.partition_offset pos USING (group_id, topic_id, partition)
  JOIN tidemark.consumer_group grp USING (group_id)
 WHERE pos.next_offset < last.old_offset
 GROUP BY grp.name;
