-- Statements of erasures.

-- name: begin
-- Waits for rewinds of the group, and keeps new ones and drains out until the end of the transaction.
SET LOCAL lock_timeout = '60s';
SELECT pg_advisory_xact_lock(%(class)s, %(group_id)s);

-- name: make_found
-- Refuses row security that would hide rows. The table: the lineage of the rows found. ``rewind_id``: of the archive; null: the sink's or overwritten.
SET LOCAL row_security = off;
CREATE TEMP TABLE tidemark_found (
    place text, rewind_id bigint, topic_id smallint, partition integer, record_offset bigint, left_over boolean
) ON COMMIT DROP;

-- name: find
INSERT INTO pg_temp.tidemark_found
SELECT %(place)s, %(rewind_id)s, kafka_topic_id, kafka_partition, kafka_offset, false FROM {table} AS present
 WHERE kafka_topic_id = ANY (%(topic_ids)s::smallint[]) AND (
{where}
);

-- name: remove
-- Locks the rows; commits that are about to replace them come first or see none.
WITH gone AS (
    DELETE FROM {table} AS present
     WHERE kafka_topic_id = ANY (%(topic_ids)s::smallint[]) AND (
{where}
)
    RETURNING kafka_topic_id, kafka_partition, kafka_offset
)
INSERT INTO pg_temp.tidemark_found SELECT %(place)s, %(rewind_id)s, gone.*, false FROM gone;

-- name: left
SELECT count(*) FROM {table} AS present
 WHERE kafka_topic_id = ANY (%(topic_ids)s::smallint[]) AND (
{where}
);

-- name: mark_left_over
-- Records that have other rows, which stay.
UPDATE pg_temp.tidemark_found found SET left_over = true
 WHERE place = %(place)s
   AND EXISTS (SELECT FROM {table} present WHERE present.kafka_topic_id = found.topic_id AND present.kafka_partition = found.partition
                                             AND present.kafka_offset = found.record_offset);

-- name: find_overwritten
-- The condition sees a kept row as a row of the sink.
INSERT INTO pg_temp.tidemark_found
SELECT 'overwritten', number, kafka_topic_id, kafka_partition, kafka_offset, false FROM tidemark.rewound_row kept
 WHERE group_id = %(group_id)s AND sink = %(sink)s
   AND EXISTS (SELECT FROM (SELECT (jsonb_populate_record(NULL::{table}, kept.kept)).*) AS present WHERE (
{where}
));

-- name: remove_overwritten
DELETE FROM tidemark.rewound_row kept USING pg_temp.tidemark_found found WHERE found.place = 'overwritten' AND kept.number = found.rewind_id;

-- name: topics
SELECT DISTINCT topic_id FROM tidemark.partition_offset WHERE group_id = %(group_id)s;

-- name: archives
SELECT rewind_id, number, relation FROM tidemark.rewind_archive
 WHERE group_id = %(group_id)s AND sink = %(sink)s AND put_back_at IS NULL AND removed_at IS NULL ORDER BY rewind_id, number FOR UPDATE;

-- name: shrink_archive
UPDATE tidemark.rewind_archive archive
   SET rows = archive.rows - (SELECT count(*) FROM pg_temp.tidemark_found WHERE place = archive.relation)
 WHERE rewind_id = %(rewind_id)s AND number = %(number)s;

-- name: count_found
SELECT count(*) FILTER (WHERE place = 'sink') AS sink_rows, count(*) FILTER (WHERE place NOT IN ('sink', 'overwritten')) AS archived_rows,
       count(*) FILTER (WHERE place = 'overwritten') AS overwritten_rows
  FROM pg_temp.tidemark_found;

-- name: count_failed
-- Settled failed records of the rows found that still have payloads, in the ledger and taken out of it.
SELECT (SELECT count(*) FROM tidemark.failed_record record
         WHERE group_id = %(group_id)s AND emptied_at IS NULL AND state IN ('LOADED', 'SKIPPED', 'DISCARDED')
           AND (topic_id, partition, record_offset) IN (SELECT topic_id, partition, record_offset FROM pg_temp.tidemark_found))
     + (SELECT count(*) FROM tidemark.rewound_failed_record record
         WHERE group_id = %(group_id)s AND emptied_at IS NULL AND state IN ('LOADED', 'SKIPPED', 'DISCARDED')
           AND (topic_id, partition, record_offset) IN (SELECT topic_id, partition, record_offset FROM pg_temp.tidemark_found));

-- name: count_examples
SELECT count(*) FROM tidemark.validation_result result
 WHERE detail #> '{observed,examples}' IS NOT NULL
   AND EXISTS (SELECT FROM tidemark.validation_row JOIN pg_temp.tidemark_found found
                   ON found.topic_id = kafka_topic_id AND found.partition = kafka_partition AND found.record_offset = kafka_offset
                WHERE validation_row.validation_id = result.validation_id AND validation_row.number = result.number);

-- name: empty_edits
UPDATE tidemark.failed_record_edit edit SET key = NULL, value = NULL, headers = '[]'
  FROM (SELECT failed_record_id, group_id, topic_id, partition, record_offset FROM tidemark.failed_record
         UNION ALL
        SELECT failed_record_id, group_id, topic_id, partition, record_offset FROM tidemark.rewound_failed_record) record
 WHERE edit.failed_record_id = record.failed_record_id AND group_id = %(group_id)s
   AND (topic_id, partition, record_offset) IN (SELECT topic_id, partition, record_offset FROM pg_temp.tidemark_found);

-- name: empty_failed
UPDATE tidemark.{records} record
   SET key = NULL, value = NULL, headers = '[]', error_text = 'erased', story = '[]', publish_error = NULL, emptied_at = clock_timestamp()
 WHERE group_id = %(group_id)s AND state IN ('LOADED', 'SKIPPED', 'DISCARDED')
   AND (topic_id, partition, record_offset) IN (SELECT topic_id, partition, record_offset FROM pg_temp.tidemark_found);

-- name: remove_examples
UPDATE tidemark.validation_result result SET detail = detail #- '{observed,examples}'
 WHERE detail #> '{observed,examples}' IS NOT NULL
   AND EXISTS (SELECT FROM tidemark.validation_row JOIN pg_temp.tidemark_found found
                   ON found.topic_id = kafka_topic_id AND found.partition = kafka_partition AND found.record_offset = kafka_offset
                WHERE validation_row.validation_id = result.validation_id AND validation_row.number = result.number);

-- name: record
-- What was erased of each batch, and of those that a rewind has cut it from: an undo brings them back.
WITH RECURSIVE found AS (
    SELECT place, rewind_id, topic_id, partition, record_offset, count(*) AS rows, NOT bool_or(left_over) AS whole
      FROM pg_temp.tidemark_found WHERE place <> 'overwritten' GROUP BY 1, 2, 3, 4, 5
), counted AS (
    SELECT batch_id, head_of, record_offset, rows, whole FROM found JOIN LATERAL (
        SELECT batch_id, head_of FROM tidemark.batch
         WHERE place = 'sink' AND group_id = %(group_id)s AND batch.topic_id = found.topic_id AND batch.partition = found.partition
           AND record_offset >= start_offset AND record_offset < end_offset
         UNION ALL
        SELECT batch_id, head_of FROM tidemark.rewound_batch
         WHERE place <> 'sink' AND rewound_by = rewind_id AND group_id = %(group_id)s AND rewound_batch.topic_id = found.topic_id
           AND rewound_batch.partition = found.partition AND record_offset >= start_offset AND record_offset < end_offset
    ) batch ON true
     UNION ALL
    SELECT above.batch_id, above.head_of, record_offset, rows, whole
      FROM counted JOIN tidemark.rewound_batch above ON above.batch_id = counted.head_of
)
INSERT INTO tidemark.erased (erasure_id, batch_id, record_offset, rows, whole)
SELECT %(erasure_id)s, batch_id, record_offset, max(rows), bool_and(whole) FROM counted GROUP BY batch_id, record_offset;

-- name: add
INSERT INTO tidemark.erasure (group_id, consumer, sink, salt, digest, sink_rows, archived_rows, overwritten_rows, failed_records, examples,
                              reason, planned_by)
VALUES (%(group_id)s, %(consumer)s, %(sink)s, %(salt)s, %(digest)s, %(sink_rows)s, %(archived_rows)s, %(overwritten_rows)s,
        %(failed_records)s, %(examples)s, %(reason)s, %(by)s)
RETURNING erasure_id;

-- name: lock
SELECT state, salt, digest FROM tidemark.erasure WHERE erasure_id = %(erasure_id)s FOR UPDATE;

-- name: applied
UPDATE tidemark.erasure
   SET state = 'APPLIED', applied_by = %(by)s, applied_at = clock_timestamp(), sink_rows = %(sink_rows)s, archived_rows = %(archived_rows)s,
       overwritten_rows = %(overwritten_rows)s, failed_records = %(failed_records)s, examples = %(examples)s
 WHERE erasure_id = %(erasure_id)s;

-- name: read
-- One erasure, or the newest ones of a consumer (null: of all consumers). Locks nothing.
SELECT erasure_id, group_id, consumer, sink, state, sink_rows, archived_rows, overwritten_rows, failed_records, examples, reason, planned_by,
       planned_at, applied_by, applied_at
  FROM tidemark.erasure
 WHERE CASE WHEN %(erasure_id)s::bigint IS NOT NULL THEN erasure_id = %(erasure_id)s
            ELSE %(consumer)s::text IS NULL OR consumer = %(consumer)s END
 ORDER BY erasure_id DESC LIMIT %(limit)s;

-- name: not_searched
-- Records of the group that were not loaded, in the ledger or taken out of it: they have payloads but no rows.
SELECT (SELECT count(*) FROM tidemark.failed_record WHERE group_id = %(group_id)s AND state <> 'LOADED' AND emptied_at IS NULL)
     + (SELECT count(*) FROM tidemark.rewound_failed_record WHERE group_id = %(group_id)s AND state <> 'LOADED' AND emptied_at IS NULL);
