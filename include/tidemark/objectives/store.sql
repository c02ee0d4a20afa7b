-- Statements on consumers' objectives.

-- name: now
-- A group's id, and the database's time. No row returned: the consumer has never run.
SELECT group_id, clock_timestamp() FROM tidemark.consumer_group WHERE name = %(group)s;

-- name: parts
-- The positions of a group in the last incarnation of each topic, without its retry topics, each with its last sample. Locks nothing.
SELECT DISTINCT ON (topic.name, partition) topic.name AS topic, partition, next_offset, pos.committed_at,
       last.sampled_at, last.position, last.log_end, last.lag, last.next_at, last.open_since
  FROM tidemark.partition_offset pos JOIN tidemark.topic USING (topic_id)
  LEFT JOIN tidemark.lag_partition last USING (group_id, topic_id, partition)
 WHERE group_id = %(group_id)s AND NOT pos.drained
 ORDER BY topic.name, partition, topic_id DESC;

-- name: failed
-- The number of a group's failed records. Locks nothing.
SELECT count(*) FROM tidemark.failed_record WHERE group_id = %(group_id)s AND state = 'FAILED';

-- name: reported
-- The missed objectives of a group that were reported. Locks nothing.
SELECT objective FROM tidemark.objective WHERE group_id = %(group_id)s;

-- name: miss
-- Stores a missed objective. Locks its row. No row returned: another session has reported it.
INSERT INTO tidemark.objective (group_id, objective, missed)
SELECT group_id, %(objective)s, %(missed)s FROM tidemark.consumer_group WHERE name = %(group)s
ON CONFLICT DO NOTHING RETURNING objective;

-- name: meet
-- Deletes an objective that is met again. Locks its row. No row returned: another session has reported it.
DELETE FROM tidemark.objective
 WHERE group_id = (SELECT group_id FROM tidemark.consumer_group WHERE name = %(group)s) AND objective = %(objective)s RETURNING objective;
