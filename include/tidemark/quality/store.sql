-- name: run_batches
-- The ledger rows of a run, by partition and offset. Locks nothing.
SELECT batch.batch_id, batch.topic_id, topic.name AS topic, batch.partition, batch.start_offset, batch.end_offset,
       batch.loaded, batch.skipped, batch.retried, batch.failed, batch.unaccounted, batch.sink_rows, batch.deleted, batch.drained
  FROM tidemark.batch
  JOIN tidemark.attempt USING (attempt_id)
  JOIN tidemark.topic USING (topic_id)
 WHERE batch.group_id = %(group_id)s
   AND (attempt.attempt_id = %(attempt_id)s OR attempt.dag_id = %(dag_id)s AND attempt.run_id = %(run_id)s)
 ORDER BY batch.topic_id, batch.partition, batch.start_offset;

-- name: unjudged_runs
-- Runs with ledger rows that have no verdict, or a critical one on rows of which a rewind has taken some (with %(critical)s, any critical
-- one), oldest first: DAG runs, and attempts outside Airflow.
-- ``running``: an attempt whose driver is at work, if it still holds one of the partitions in which it has committed. Locks nothing.
SELECT dag_id, run_id, CASE WHEN dag_id IS NULL THEN attempt_id END AS attempt_id,
       max(attempt_id) FILTER (WHERE state = 'RUNNING' AND EXISTS (
           SELECT FROM tidemark.batch own JOIN tidemark.partition_offset held USING (group_id, topic_id, partition, owner_epoch)
            WHERE own.attempt_id = attempt.attempt_id)
           AND EXISTS (SELECT FROM pg_stat_activity
                        WHERE datname = current_database() AND application_name = 'tidemark driver ' || attempt.attempt_id)) AS running
  FROM (SELECT DISTINCT attempt_id, dag_id, run_id, state
          FROM (SELECT attempt_id FROM tidemark.batch WHERE group_id = %(group_id)s AND validation_id IS NULL
                 UNION ALL
                SELECT attempt_id FROM tidemark.validation JOIN tidemark.batch USING (validation_id)
                 WHERE validation.group_id = %(group_id)s AND verdict = 'critical'
                   AND (%(critical)s OR EXISTS (SELECT FROM tidemark.rewound_batch taken WHERE taken.validation_id = validation.validation_id))
               ) unjudged
          JOIN tidemark.attempt USING (attempt_id)) attempt
 GROUP BY dag_id, run_id, CASE WHEN dag_id IS NULL THEN attempt_id END
 ORDER BY min(attempt_id);

-- name: fence_run
-- Ends the attempts of a DAG run that have not ended, and takes their partitions from them: later commits are refused. Locks the
-- positions, in the common lock order, and the attempts.
WITH running AS MATERIALIZED (
    SELECT attempt_id FROM tidemark.attempt
     WHERE group_id = %(group_id)s AND dag_id = %(dag_id)s AND run_id = %(run_id)s AND state = 'RUNNING'
), held AS MATERIALIZED (
    SELECT position.group_id, position.topic_id, position.partition FROM tidemark.partition_offset position
     WHERE group_id = %(group_id)s
       AND EXISTS (SELECT FROM tidemark.batch JOIN running USING (attempt_id)
                    WHERE batch.group_id = position.group_id AND batch.topic_id = position.topic_id
                      AND batch.partition = position.partition AND batch.owner_epoch = position.owner_epoch)
     ORDER BY topic_id, partition FOR NO KEY UPDATE
), fenced AS (
    UPDATE tidemark.partition_offset position SET owner = NULL, owner_epoch = owner_epoch + 1
      FROM held
     WHERE position.group_id = held.group_id AND position.topic_id = held.topic_id AND position.partition = held.partition
)
UPDATE tidemark.attempt
   SET state = 'FAILED', ended_at = clock_timestamp(),
       error = jsonb_build_object('kind', 'fenced', 'type', 'Validated', 'text', 'Its validation began before this attempt had ended.')
  FROM running WHERE attempt.attempt_id = running.attempt_id
RETURNING attempt.attempt_id;

-- name: expose_loaded
-- The records that the attempts of these drained batches loaded and that no rewind has withdrawn since.
CREATE TEMPORARY TABLE tidemark_run_loaded ON COMMIT DROP AS
SELECT topic_id, partition, record_offset, sink_rows
  FROM tidemark.failed_record
 WHERE group_id = %(group_id)s AND state = 'LOADED' AND tried_at >= (SELECT min(attempt.started_at) FROM tidemark.batch
                                                                       JOIN tidemark.attempt USING (attempt_id)
                                                                      WHERE batch_id = ANY (%(batch_ids)s::bigint[]))
   AND attempt_id IN (SELECT attempt_id FROM tidemark.batch WHERE batch_id = ANY (%(batch_ids)s::bigint[]));

-- name: loaded_ranges
-- Where these records were first read, as the fewest possible ranges. A partition with more than %(most)s ranges gets one, from its first
-- record to its last. Needs `expose_loaded`.
SELECT topic_id, topic.name AS topic, partition, min(start_offset) AS start_offset, max(end_offset) AS end_offset
  FROM (SELECT topic_id, partition, min(record_offset) AS start_offset, max(record_offset) + 1 AS end_offset,
               count(*) OVER (PARTITION BY topic_id, partition) AS islands
          FROM (SELECT *, record_offset - row_number() OVER (PARTITION BY topic_id, partition ORDER BY record_offset) AS island
                  FROM tidemark_run_loaded) numbered
         GROUP BY topic_id, partition, island) run
  JOIN tidemark.topic USING (topic_id)
 GROUP BY topic_id, topic.name, partition, CASE WHEN islands <= %(most)s THEN start_offset END
 ORDER BY topic_id, partition, start_offset;

-- name: loaded_violations
-- Partitions in which the sink does not hold as many rows of these records as they produced. Needs `expose_loaded` and the rows.
SELECT 'sink rows' AS kind, topic.name AS topic, partition, said.start, said."end", expected, coalesce(found, 0) AS found
  FROM (SELECT topic_id, partition, min(record_offset) AS start, max(record_offset) + 1 AS "end", sum(sink_rows)::bigint AS expected
          FROM tidemark_run_loaded GROUP BY topic_id, partition) said
  JOIN tidemark.topic USING (topic_id)
  LEFT JOIN (SELECT kafka_topic_id AS topic_id, kafka_partition AS partition, count(*) AS found
               FROM tidemark_run GROUP BY kafka_topic_id, kafka_partition) written USING (topic_id, partition)
 WHERE CASE WHEN %(upsert)s THEN coalesce(found, 0) > expected ELSE coalesce(found, 0) <> expected END
 ORDER BY topic_id, partition;

-- name: add_validation
-- Stores a verdict. Locks the group's row against deletion only.
INSERT INTO tidemark.validation (group_id, dag_id, run_id, suite, verdict, sink_rows, seconds, ranges)
VALUES (%(group_id)s, %(dag_id)s, %(run_id)s, %(suite)s, %(verdict)s, %(sink_rows)s, %(seconds)s, %(ranges)s) RETURNING validation_id;

-- name: add_result
INSERT INTO tidemark.validation_result (validation_id, number, expectation, severity, success, detail)
VALUES (%(validation_id)s, %(number)s, %(expectation)s, %(severity)s, %(success)s, %(detail)s);

-- name: add_rows
-- Stores the failing rows of an expectation.
INSERT INTO tidemark.validation_row (validation_id, number, kafka_topic_id, kafka_partition, kafka_offset, kafka_seq)
SELECT %(validation_id)s, %(number)s, *
  FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[], %(offsets)s::bigint[], %(seqs)s::integer[]);

-- name: lock_partitions
-- Locks the positions of these batches' partitions, in the common lock order.
SELECT FROM tidemark.partition_offset
 WHERE group_id = %(group_id)s
   AND (topic_id, partition) IN (SELECT topic_id, partition FROM tidemark.batch WHERE batch_id = ANY (%(batch_ids)s::bigint[]))
 ORDER BY topic_id, partition FOR NO KEY UPDATE;

-- name: mark_batches
-- Assigns the verdict, which replaces an earlier one. Skips batches that a rewind has removed meanwhile. Locks the batches.
UPDATE tidemark.batch SET validation_id = %(validation_id)s WHERE batch_id = ANY (%(batch_ids)s::bigint[]);

-- name: advance_validated
-- Moves the validated offset of these partitions up to the first batch without a verdict or with a critical one, across batches and lost
-- ranges with a known end. Never moves it down. Needs `lock_partitions`.
WITH RECURSIVE held AS MATERIALIZED (
    SELECT group_id, topic_id, partition, validated_offset, next_offset FROM tidemark.partition_offset
     WHERE group_id = %(group_id)s
       AND (topic_id, partition) IN (SELECT topic_id, partition FROM tidemark.batch WHERE batch_id = ANY (%(batch_ids)s::bigint[]))
), walk AS (
    SELECT group_id, topic_id, partition, validated_offset AS reached FROM held
     UNION ALL
    SELECT walk.group_id, walk.topic_id, walk.partition, step.end_offset
      FROM walk
     CROSS JOIN LATERAL (
        (SELECT CASE WHEN verdict IN ('passed', 'warning') THEN end_offset END AS end_offset
           FROM tidemark.batch LEFT JOIN tidemark.validation USING (validation_id)
          WHERE batch.group_id = walk.group_id AND batch.topic_id = walk.topic_id AND batch.partition = walk.partition
            AND batch.start_offset <= walk.reached
          ORDER BY batch.start_offset DESC LIMIT 1)
         UNION ALL
        (SELECT end_offset FROM tidemark.lost_range
          WHERE lost_range.group_id = walk.group_id AND lost_range.topic_id = walk.topic_id AND lost_range.partition = walk.partition
            AND lost_range.start_offset <= walk.reached
          ORDER BY lost_range.start_offset DESC LIMIT 1)
     ) step
     WHERE step.end_offset > walk.reached
), reached AS (
    SELECT group_id, topic_id, partition, max(reached) AS reached FROM walk GROUP BY group_id, topic_id, partition
)
UPDATE tidemark.partition_offset SET validated_offset = least(reached.reached, next_offset)
  FROM reached
 WHERE partition_offset.group_id = reached.group_id AND partition_offset.topic_id = reached.topic_id
   AND partition_offset.partition = reached.partition AND reached.reached > partition_offset.validated_offset;
