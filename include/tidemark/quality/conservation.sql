-- name: batch_violations
-- Batches whose rows or failed records differ from the ledger. A record loaded by a retry counts with the batch that first read it: its
-- rows have that lineage. Erased rows are in the ledger only. Reads only: one scan of the sink's lineage index per batch.
WITH judged AS MATERIALIZED (
    SELECT * FROM tidemark.batch
     WHERE group_id = %(group_id)s AND (%(batch_ids)s::bigint[] IS NULL OR batch_id = ANY (%(batch_ids)s::bigint[])) AND NOT drained
), counted AS (
    SELECT judged.*, sink.*, record.*, erased.*
      FROM judged
     CROSS JOIN LATERAL (
        SELECT count(*) AS found_rows, count(DISTINCT written.kafka_offset) AS found_loaded
          FROM {table} written
         WHERE written.kafka_topic_id = judged.topic_id AND written.kafka_partition = judged.partition
           AND written.kafka_offset >= judged.start_offset AND written.kafka_offset < judged.end_offset
     ) sink
     CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE disposition = 'retry') AS found_retried, count(*) FILTER (WHERE disposition = 'fail') AS found_failed,
               count(*) FILTER (WHERE state = 'LOADED') AS loaded_later, coalesce(sum(record.sink_rows), 0)::bigint AS rows_later
          FROM tidemark.failed_record record
         WHERE record.group_id = judged.group_id AND record.topic_id = judged.topic_id AND record.partition = judged.partition
           AND record.record_offset >= judged.start_offset AND record.record_offset < judged.end_offset
     ) record
     CROSS JOIN LATERAL (
        SELECT count(DISTINCT record_offset) FILTER (WHERE whole) AS erased_loaded, coalesce(sum(rows), 0)::bigint AS erased_rows
          FROM tidemark.erased WHERE erased.batch_id = judged.batch_id
     ) erased
)
SELECT violation.kind, topic.name AS topic, counted.partition, counted.start_offset AS start, counted.end_offset AS end,
       violation.expected, violation.found
  FROM counted
  JOIN tidemark.topic USING (topic_id)
 CROSS JOIN LATERAL (
    VALUES ('loaded', loaded + loaded_later - erased_loaded, found_loaded), ('sink rows', sink_rows + rows_later - erased_rows, found_rows),
           ('retried', retried, found_retried), ('failed', failed, found_failed)
 ) AS violation (kind, expected, found)
 WHERE CASE WHEN violation.kind = 'loaded' AND whole_batch_id IS NOT NULL THEN false -- its rows belong to no single record
            WHEN %(upsert)s AND violation.kind IN ('loaded', 'sink rows') THEN violation.found > violation.expected
            ELSE violation.found <> violation.expected END
 ORDER BY counted.topic_id, counted.partition, counted.start_offset, violation.kind;

-- name: ledger_violations
-- Gaps and overlaps in the ledger of a partition, and ledgers that do not end at the position. Reads only: the judged batches (for a
-- whole group also its lost ranges), each with its neighbours. A lost range with an unknown end counts as empty.
WITH piece AS NOT MATERIALIZED (
    SELECT group_id, topic_id, partition, start_offset, end_offset, batch_id FROM tidemark.batch
     UNION ALL
    SELECT group_id, topic_id, partition, start_offset, coalesce(end_offset, start_offset), NULL FROM tidemark.lost_range
), judged AS MATERIALIZED (
    SELECT * FROM piece
     WHERE group_id = %(group_id)s AND (%(batch_ids)s::bigint[] IS NULL OR batch_id = ANY (%(batch_ids)s::bigint[]))
), neighbours AS (
    SELECT judged.*, pos.next_offset, before.end_offset AS before_end, after.start_offset AS after_start
      FROM judged
      JOIN tidemark.partition_offset pos USING (group_id, topic_id, partition)
      LEFT JOIN LATERAL (
        SELECT end_offset FROM piece
         WHERE piece.group_id = judged.group_id AND piece.topic_id = judged.topic_id AND piece.partition = judged.partition
           AND piece.start_offset < judged.start_offset
         ORDER BY start_offset DESC LIMIT 1
      ) before ON true
      LEFT JOIN LATERAL (
        SELECT start_offset FROM piece
         WHERE piece.group_id = judged.group_id AND piece.topic_id = judged.topic_id AND piece.partition = judged.partition
           AND piece.start_offset >= judged.start_offset
           AND (piece.start_offset > judged.start_offset OR judged.batch_id IS NOT NULL AND piece.batch_id IS NULL)
         ORDER BY start_offset LIMIT 1
      ) after ON true
), violation AS (
    SELECT CASE WHEN before_end < start_offset THEN 'gap' ELSE 'overlap' END AS kind, topic_id, partition,
           least(before_end, start_offset) AS start, greatest(before_end, start_offset) AS end, before_end AS expected, start_offset AS found
      FROM neighbours WHERE before_end <> start_offset
     UNION
    SELECT CASE WHEN after_start > end_offset THEN 'gap' ELSE 'overlap' END, topic_id, partition,
           least(after_start, end_offset), greatest(after_start, end_offset), end_offset, after_start
      FROM neighbours WHERE after_start <> end_offset
     UNION
    SELECT 'position', topic_id, partition, least(end_offset, next_offset), greatest(end_offset, next_offset), end_offset, next_offset
      FROM neighbours WHERE after_start IS NULL AND end_offset <> next_offset
)
SELECT kind, topic.name AS topic, partition, start, "end", expected, found
  FROM violation JOIN tidemark.topic USING (topic_id)
 ORDER BY topic_id, partition, start, kind;

-- name: orphans
-- Rows and failed records of the group's topics that no ledger row accounts for. Reads only: the lineage index before, between and
-- after the ledger's ranges, and for partitions that the group does not have.
WITH held AS MATERIALIZED (
    SELECT topic_id, partition FROM tidemark.partition_offset WHERE group_id = %(group_id)s
), covered AS (
    SELECT topic_id, partition, start_offset, end_offset,
           max(end_offset) OVER (PARTITION BY topic_id, partition ORDER BY start_offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
               AS before_end
      FROM tidemark.batch WHERE group_id = %(group_id)s
), uncovered AS MATERIALIZED (
    SELECT topic_id, partition, coalesce(before_end, '-9223372036854775808') AS start, start_offset AS end
      FROM covered WHERE before_end IS NULL OR before_end < start_offset
     UNION ALL
    SELECT topic_id, partition, coalesce(max(end_offset), '-9223372036854775808'), 9223372036854775807
      FROM held LEFT JOIN covered USING (topic_id, partition) GROUP BY topic_id, partition
), beside AS MATERIALIZED (
    SELECT topic_id, coalesce(lag(partition) OVER by_partition, -2147483648::bigint) AS above, partition::bigint AS below
      FROM held WINDOW by_partition AS (PARTITION BY topic_id ORDER BY partition)
     UNION ALL
    SELECT topic_id, max(partition), 2147483648 FROM held GROUP BY topic_id
), violation AS (
    SELECT 'orphan rows' AS kind, topic_id, partition, found.*
      FROM uncovered
     CROSS JOIN LATERAL (
        SELECT min(written.kafka_offset) AS start, max(written.kafka_offset) + 1 AS end, count(*) AS found
          FROM {table} written
         WHERE written.kafka_topic_id = uncovered.topic_id AND written.kafka_partition = uncovered.partition
           AND written.kafka_offset >= uncovered.start AND written.kafka_offset < uncovered.end
     ) found
     UNION ALL
    SELECT 'orphan rows', topic_id, found.*
      FROM beside
     CROSS JOIN LATERAL (
        SELECT written.kafka_partition, min(written.kafka_offset), max(written.kafka_offset) + 1, count(*)
          FROM {table} written
         WHERE written.kafka_topic_id = beside.topic_id AND written.kafka_partition > beside.above AND written.kafka_partition < beside.below
         GROUP BY written.kafka_partition
     ) found
     UNION ALL
    SELECT 'orphan failed records', topic_id, partition, found.*
      FROM uncovered
     CROSS JOIN LATERAL (
        SELECT min(record.record_offset), max(record.record_offset) + 1, count(*)
          FROM tidemark.failed_record record
         WHERE record.group_id = %(group_id)s AND record.topic_id = uncovered.topic_id AND record.partition = uncovered.partition
           AND record.record_offset >= uncovered.start AND record.record_offset < uncovered.end
     ) found
)
SELECT kind, topic.name AS topic, partition, start, "end", 0 AS expected, found
  FROM violation JOIN tidemark.topic USING (topic_id)
 WHERE found > 0
 ORDER BY topic_id, partition, start, kind;
