-- The audit's statements, run in one snapshot. They lock nothing.

-- name: accounts
-- For each partition of a group: the records read according to the ledger, and the current states of those not loaded at once.
WITH ledger AS (
    SELECT topic_id, partition, sum(end_offset - start_offset)::bigint AS read, sum(loaded)::bigint AS loaded, sum(skipped)::bigint AS skipped,
           sum(retried + failed)::bigint AS handed_off, sum(unaccounted)::bigint AS unaccounted
      FROM tidemark.batch WHERE group_id = %(group_id)s AND NOT drained GROUP BY topic_id, partition
), tier AS (
    SELECT topic_id, partition, state, CASE state WHEN 'WAITING' THEN coalesce(retry_topic, '') WHEN 'HELD' THEN 'held' END AS topic, count(*) AS records
      FROM tidemark.failed_record WHERE group_id = %(group_id)s GROUP BY 1, 2, 3, 4
), record AS (
    SELECT topic_id, partition, sum(records)::bigint AS kept,
           coalesce(sum(records) FILTER (WHERE state = 'LOADED'), 0)::bigint AS loaded,
           coalesce(sum(records) FILTER (WHERE state = 'SKIPPED'), 0)::bigint AS skipped,
           coalesce(sum(records) FILTER (WHERE state = 'FAILED'), 0)::bigint AS failed,
           coalesce(sum(records) FILTER (WHERE state = 'DISCARDED'), 0)::bigint AS discarded,
           coalesce(jsonb_object_agg(topic, records) FILTER (WHERE state IN ('WAITING', 'HELD')), '{}') AS waiting
      FROM tier GROUP BY topic_id, partition
)
SELECT topic.name AS topic, partition, coalesce(ledger.read, 0) AS read, coalesce(ledger.loaded, 0) AS loaded_at_once,
       coalesce(record.loaded, 0) AS loaded_later, coalesce(ledger.skipped, 0) + coalesce(record.skipped, 0) AS skipped,
       coalesce(record.waiting, '{}') AS waiting, coalesce(record.failed, 0) AS failed, coalesce(record.discarded, 0) AS discarded,
       coalesce(ledger.unaccounted, 0) AS unaccounted, coalesce(ledger.handed_off, 0) AS handed_off, coalesce(record.kept, 0) AS kept
  FROM ledger FULL JOIN record USING (topic_id, partition) JOIN tidemark.topic USING (topic_id)
 ORDER BY topic.name, topic_id, partition;

-- name: registered
-- For each retry topic: the range of offsets at which the group's waiting records are registered, and the drains' positions.
SELECT topic.name AS topic, kafka_uuid, retry_partition AS partition, min(retry_offset) AS first, max(retry_offset) AS last, count(*) AS records,
       count(*) FILTER (WHERE retry_offset < pos.next_offset) AS passed
  FROM tidemark.failed_record record JOIN tidemark.topic ON topic.topic_id = retry_topic_id
  LEFT JOIN tidemark.partition_offset pos
         ON pos.group_id = record.group_id AND pos.topic_id = retry_topic_id AND pos.partition = retry_partition AND pos.drained
 WHERE record.group_id = %(group_id)s AND state = 'WAITING' AND retry_offset IS NOT NULL
 GROUP BY topic.name, kafka_uuid, retry_partition ORDER BY topic.name, retry_partition;
