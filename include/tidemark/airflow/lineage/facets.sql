-- The lineage of an attempt. Locks nothing.

-- name: attempt_ranges
-- The ranges that an attempt has committed: adjoining batches of a partition are one range.
SELECT topic.name AS topic, partition, min(start_offset) AS start, max(end_offset) AS "end", sum(sink_rows)::bigint AS sink_rows, sum(deleted)::bigint AS deleted
  FROM (SELECT *, count(*) FILTER (WHERE apart) OVER (PARTITION BY topic_id, partition ORDER BY start_offset) AS number
          FROM (SELECT topic_id, partition, start_offset, end_offset, sink_rows, deleted,
                       start_offset <> lag(end_offset) OVER (PARTITION BY topic_id, partition ORDER BY start_offset) AS apart
                  FROM tidemark.batch WHERE attempt_id = %(attempt_id)s) step) numbered
  JOIN tidemark.topic USING (topic_id)
 GROUP BY topic.name, topic_id, partition, number ORDER BY topic.name, topic_id, partition, "start";
