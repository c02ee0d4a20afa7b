-- name: taken_back
-- The rewind, not undone since, that a failed validation of this run caused: its planner is a critical validation of the same run.
-- Locks nothing.
SELECT rewind_id, validation_id
  FROM tidemark.rewind
  JOIN tidemark.rewind_group USING (rewind_id)
  JOIN tidemark.validation judged USING (group_id)
 WHERE group_id = %(group_id)s AND rewind.dag_id = %(dag_id)s AND rewind.run_id = %(run_id)s AND rewind.state = 'APPLIED'
   AND judged.verdict = 'critical' AND judged.dag_id = rewind.dag_id AND judged.run_id = rewind.run_id
   AND rewind.planned_by = 'validation ' || judged.validation_id
 ORDER BY rewind_id DESC LIMIT 1;

-- name: taken_back_before
-- The ranges of a run's batches that rewinds of failed validations took back before, even if undone since. Locks nothing.
SELECT rewind_id, topic.name AS topic, batch.partition, min(greatest(batch.start_offset, part.superseded_from)) AS start_offset,
       max(least(batch.end_offset, part.old_offset)) AS end_offset
  FROM tidemark.batch
  JOIN tidemark.attempt USING (attempt_id)
  JOIN tidemark.topic USING (topic_id)
  JOIN tidemark.rewind_partition part
    ON part.group_id = batch.group_id AND part.topic_id = batch.topic_id AND part.partition = batch.partition AND NOT part.hold
       AND part.superseded_from < batch.end_offset AND part.old_offset > batch.start_offset
  JOIN tidemark.rewind USING (rewind_id)
 WHERE batch.group_id = %(group_id)s AND attempt.dag_id = %(dag_id)s AND attempt.run_id = %(run_id)s
   AND rewind.state IN ('APPLIED', 'UNDONE')
   AND EXISTS (SELECT FROM tidemark.validation judged
                WHERE judged.group_id = batch.group_id AND judged.verdict = 'critical' AND judged.dag_id = rewind.dag_id
                  AND judged.run_id = rewind.run_id AND rewind.planned_by = 'validation ' || judged.validation_id)
 GROUP BY rewind_id, topic.name, batch.partition ORDER BY rewind_id DESC, topic.name, batch.partition;

-- name: used_already
-- The partitions of a run's batches on which readers have seen its rows or later ones: rows below the validated offset, or later rows of
-- another run that was validated. Locks nothing.
WITH mine AS (
    SELECT batch.group_id, batch.topic_id, batch.partition, min(batch.start_offset) AS start_offset
      FROM tidemark.batch JOIN tidemark.attempt USING (attempt_id)
     WHERE batch.group_id = %(group_id)s AND attempt.dag_id = %(dag_id)s AND attempt.run_id = %(run_id)s
     GROUP BY batch.group_id, batch.topic_id, batch.partition
)
SELECT topic.name AS topic, mine.partition, mine.start_offset
  FROM mine
  JOIN tidemark.topic USING (topic_id)
  JOIN tidemark.partition_offset pos USING (group_id, topic_id, partition)
 WHERE pos.validated_offset > mine.start_offset
    OR EXISTS (SELECT FROM tidemark.batch JOIN tidemark.attempt USING (attempt_id)
                WHERE batch.group_id = mine.group_id AND batch.topic_id = mine.topic_id AND batch.partition = mine.partition
                  AND batch.start_offset > mine.start_offset AND batch.validation_id IS NOT NULL
                  AND (attempt.dag_id, attempt.run_id) IS DISTINCT FROM (%(dag_id)s, %(run_id)s))
 ORDER BY topic.name, mine.partition;
