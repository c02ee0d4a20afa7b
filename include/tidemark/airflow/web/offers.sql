-- Statements of the forms. They lock nothing.

-- name: runs
-- The last Airflow runs of a group that have committed, newest first.
SELECT dag_id, run_id, min(started_at) AS started_at
  FROM (SELECT * FROM tidemark.attempt
         WHERE group_id = (SELECT group_id FROM tidemark.consumer_group WHERE name = %(group)s) AND run_id IS NOT NULL AND of_rewind IS NULL
           AND EXISTS (SELECT FROM tidemark.batch WHERE batch.attempt_id = attempt.attempt_id AND NOT drained)
         ORDER BY attempt_id DESC LIMIT 30) attempt
 GROUP BY dag_id, run_id ORDER BY max(attempt_id) DESC LIMIT %(limit)s;

-- name: first_failed_batch
-- The batch that has read the oldest failed record of a group.
SELECT batch.batch_id
  FROM (SELECT * FROM tidemark.failed_record
         WHERE group_id = (SELECT group_id FROM tidemark.consumer_group WHERE name = %(group)s) AND state = 'FAILED'
         ORDER BY failed_record_id LIMIT 1) record
  JOIN tidemark.batch USING (group_id, topic_id, partition)
 WHERE NOT batch.drained AND record_offset >= batch.start_offset AND record_offset < batch.end_offset
 ORDER BY batch.batch_id DESC LIMIT 1;
