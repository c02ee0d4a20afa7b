-- Statements on verdicts that asset events announce.

-- name: unannounced
-- Verdicts on batches of a group that no event has announced, oldest first. Locks nothing.
SELECT validation_id, verdict FROM tidemark.validation
 WHERE group_id = %(group_id)s AND (announced_at IS NULL OR validation_id = %(again)s) AND ranges <> '{}' AND verdict = ANY (%(verdicts)s::text[])
   AND EXISTS (SELECT FROM tidemark.batch WHERE batch.validation_id = validation.validation_id)
 ORDER BY validation_id;

-- name: batches
-- The batches that have these verdicts. Locks nothing.
SELECT batch_id, drained, topic.name AS topic, partition, start_offset, end_offset,
       loaded, skipped, retried, failed, unaccounted, sink_rows, deleted
  FROM tidemark.batch JOIN tidemark.topic USING (topic_id) WHERE validation_id = ANY (%(validation_ids)s::bigint[]);

-- name: announced
-- Locks these verdicts.
UPDATE tidemark.validation SET announced_at = clock_timestamp() WHERE validation_id = ANY (%(validation_ids)s::bigint[]);
