-- Statements of erasures.

-- name: begin
-- Waits for rewinds, drains and commits of the group, and blocks new ones until the end of the transaction.
SET LOCAL lock_timeout = '60s';
SELECT pg_advisory_xact_lock(%(rewinds)s, %(group_id)s);
SET LOCAL lock_timeout = '600s';
SELECT pg_advisory_xact_lock(%(commits)s, %(group_id)s);
SET LOCAL lock_timeout = '60s';

-- name: make_found
-- Refuses row security that would hide rows. ``found`` holds the lineage of matching rows; ``rewind_id``: of the archive, null for rows of the
-- sink and overwritten ones; ``digest``: of an upsert sink's key; ``again``: a replay restores the row. ``person`` holds the records to suppress.
SET LOCAL row_security = off;
CREATE TEMP TABLE tidemark_found (
    place text, rewind_id bigint, topic_id smallint, partition integer, record_offset bigint, left_over boolean,
    digest bytea, again boolean DEFAULT false
) ON COMMIT DROP;
CREATE TEMP TABLE tidemark_person (topic_id smallint, partition integer, record_offset bigint) ON COMMIT DROP;

-- name: add_records
INSERT INTO pg_temp.tidemark_person
SELECT %(topic_id)s::smallint, %(partition)s, record_offset FROM unnest(%(offsets)s::bigint[]) record_offset;

-- name: add_failed
-- Failed records of a key, before or after an edit, in the ledger and removed from it.
INSERT INTO pg_temp.tidemark_person
SELECT topic_id, partition, record_offset
  FROM (SELECT group_id, failed_record_id, topic_id, partition, record_offset, key FROM tidemark.failed_record
         UNION ALL
        SELECT group_id, failed_record_id, topic_id, partition, record_offset, key FROM tidemark.rewound_failed_record) record
 WHERE group_id = %(group_id)s AND (key = %(key)s OR EXISTS (SELECT FROM tidemark.failed_record_edit edit
                                                              WHERE edit.failed_record_id = record.failed_record_id AND edit.key = %(key)s))
EXCEPT SELECT topic_id, partition, record_offset FROM pg_temp.tidemark_person;
ANALYZE pg_temp.tidemark_person;

-- name: find
INSERT INTO pg_temp.tidemark_found
SELECT %(place)s, %(rewind_id)s, kafka_topic_id, kafka_partition, kafka_offset, false, {digest} FROM {table} AS present
 WHERE kafka_topic_id = ANY (%(topic_ids)s::smallint[]) AND (
{where}
);

-- name: remove
-- Locks the rows; commits that are about to replace them finish first or find none.
WITH gone AS (
    DELETE FROM {table} AS present
     WHERE kafka_topic_id = ANY (%(topic_ids)s::smallint[]) AND (
{where}
)
    RETURNING kafka_topic_id, kafka_partition, kafka_offset, false, {digest}
)
INSERT INTO pg_temp.tidemark_found SELECT %(place)s, %(rewind_id)s, gone.* FROM gone;

-- name: left
SELECT count(*) FROM {table} AS present
 WHERE kafka_topic_id = ANY (%(topic_ids)s::smallint[]) AND (
{where}
);

-- name: mark_left_over
-- Records with other rows, which stay. ``planned``: the matching rows still exist.
UPDATE pg_temp.tidemark_found found SET left_over = true
  FROM (SELECT topic_id, partition, record_offset, count(*) AS rows FROM pg_temp.tidemark_found WHERE place = %(place)s GROUP BY 1, 2, 3) record
 WHERE place = %(place)s
   AND (found.topic_id, found.partition, found.record_offset) = (record.topic_id, record.partition, record.record_offset)
   AND (SELECT count(*) FROM {table} present
         WHERE present.kafka_topic_id = record.topic_id AND present.kafka_partition = record.partition
           AND present.kafka_offset = record.record_offset) > CASE WHEN %(planned)s THEN record.rows ELSE 0 END;

-- name: find_overwritten
-- The condition reads a kept row as a row of the sink.
INSERT INTO pg_temp.tidemark_found
SELECT 'overwritten', number, kept.kafka_topic_id, kept.kafka_partition, kept.kafka_offset, false, present.digest
  FROM tidemark.rewound_row kept
 CROSS JOIN LATERAL (SELECT {digest} AS digest FROM (SELECT (jsonb_populate_record(NULL::{table}, kept.kept)).*) AS present WHERE (
{where}
)) present
 WHERE group_id = %(group_id)s AND sink = %(sink)s;

-- name: find_deleted
-- Like `find_overwritten`, for deletions and the rows that they removed.
INSERT INTO pg_temp.tidemark_found
SELECT 'deleted', deletion_id, gone.kafka_topic_id, gone.kafka_partition, gone.kafka_offset, false, present.digest
  FROM tidemark.deletion gone
 CROSS JOIN LATERAL (
    SELECT to_jsonb(record) || gone.key || coalesce(gone.kept, '{{}}') AS known
      FROM (SELECT gone.kafka_topic_id, gone.kafka_partition, gone.kafka_offset, gone.kafka_seq) record
 ) record
 CROSS JOIN LATERAL (SELECT {digest} AS digest FROM (SELECT (jsonb_populate_record(NULL::{table}, known)).*) AS present WHERE (
{where}
)) present
 WHERE sink = %(sink)s AND gone.kafka_topic_id IN (SELECT topic_id FROM tidemark.partition_offset WHERE group_id = %(group_id)s);

-- name: aggregates
-- Whether rows of the group belong to whole batches, not to records.
SELECT EXISTS (SELECT FROM tidemark.batch WHERE group_id = %(group_id)s AND whole_batch_id IS NOT NULL);

-- name: mark_again
-- Rows that a replay restores: rows of whole batches, and in an append sink rows of records that keep other rows.
UPDATE pg_temp.tidemark_found found SET again = true
 WHERE (left_over AND NOT %(by_row)s)
    OR EXISTS (SELECT FROM (SELECT group_id, topic_id, partition, start_offset, end_offset, whole_batch_id FROM tidemark.batch
                             UNION ALL
                            SELECT group_id, topic_id, partition, start_offset, end_offset, whole_batch_id FROM tidemark.rewound_batch) batch
                WHERE batch.group_id = %(group_id)s AND batch.topic_id = found.topic_id AND batch.partition = found.partition
                  AND found.record_offset >= start_offset AND found.record_offset < end_offset AND whole_batch_id IS NOT NULL);

-- name: choose
-- The records of the matching rows, except records that keep other rows.
INSERT INTO pg_temp.tidemark_person
SELECT topic_id, partition, record_offset FROM pg_temp.tidemark_found GROUP BY 1, 2, 3 HAVING NOT bool_or(left_over OR again);

-- name: count_suppressed
-- The number that `suppress` would store, and of records whose rows a replay restores.
SELECT CASE WHEN %(by_row)s THEN (SELECT count(DISTINCT (topic_id, partition, digest)) FROM pg_temp.tidemark_found WHERE NOT again)
            ELSE (SELECT count(*) FROM pg_temp.tidemark_person) END AS suppressed,
       (SELECT count(*) FROM (SELECT FROM pg_temp.tidemark_found GROUP BY topic_id, partition, record_offset HAVING bool_or(again)) record)
           AS not_suppressed;

-- name: suppress_records
INSERT INTO tidemark.suppressed (group_id, topic_id, partition, record_offset, erasure_id)
SELECT %(group_id)s, topic_id, partition, record_offset, %(erasure_id)s FROM pg_temp.tidemark_person ON CONFLICT DO NOTHING;

-- name: key_salt
-- The salt of a sink's keys. Locks out other erasures, so that there is only one.
SELECT pg_advisory_xact_lock(hashtextextended('tidemark.suppressed_key ' || %(sink)s, 0));
SELECT salt FROM tidemark.suppressed_key WHERE sink = %(sink)s LIMIT 1;

-- name: suppress_keys
-- A row that was in the sink was the last one of its key below the position; another one may have had successors.
INSERT INTO tidemark.suppressed_key AS present (sink, topic_id, partition, digest, salt, below, erasure_id)
SELECT %(sink)s, topic_id, found.partition, digest, %(salt)s,
       max(CASE WHEN place = 'sink' THEN greatest(pos.next_offset, record_offset + 1) ELSE record_offset + 1 END), %(erasure_id)s
  FROM pg_temp.tidemark_found found
  LEFT JOIN (SELECT topic_id, partition, next_offset FROM tidemark.partition_offset WHERE group_id = %(group_id)s) pos USING (topic_id, partition)
 WHERE NOT again GROUP BY topic_id, found.partition, digest
ON CONFLICT (sink, topic_id, partition, digest) DO UPDATE SET below = greatest(present.below, excluded.below);

-- name: remove_deleted
DELETE FROM tidemark.deletion USING pg_temp.tidemark_found found WHERE found.place = 'deleted' AND deletion_id = found.rewind_id;

-- name: remove_overwritten
DELETE FROM tidemark.rewound_row kept USING pg_temp.tidemark_found found WHERE found.place = 'overwritten' AND kept.number = found.rewind_id;

-- name: now
SELECT clock_timestamp();

-- name: topics
SELECT DISTINCT topic_id FROM tidemark.partition_offset WHERE group_id = %(group_id)s;

-- name: archives
SELECT rewind_id, number, sink, relation FROM tidemark.rewind_archive
 WHERE group_id = %(group_id)s AND sink = %(sink)s AND put_back_at IS NULL AND removed_at IS NULL ORDER BY rewind_id, number FOR UPDATE;

-- name: shrink_archive
UPDATE tidemark.rewind_archive archive
   SET rows = archive.rows - (SELECT count(*) FROM pg_temp.tidemark_found WHERE place = archive.relation)
 WHERE rewind_id = %(rewind_id)s AND number = %(number)s;

-- name: count_found
SELECT count(*) FILTER (WHERE place = 'sink') AS sink_rows, count(*) FILTER (WHERE place NOT IN ('sink', 'overwritten', 'deleted')) AS archived_rows,
       count(*) FILTER (WHERE place IN ('overwritten', 'deleted')) AS overwritten_rows
  FROM pg_temp.tidemark_found;

-- name: mark_failed
-- Failed records to erase, in the ledger and removed from it: the person's in every state, and settled ones of the matching rows.
CREATE TEMP TABLE tidemark_failed ON COMMIT DROP AS
SELECT failed_record_id, emptied_at IS NULL AS has_payload, retry_topic, retry_number, redrives, changed_at
  FROM (SELECT failed_record_id, group_id, topic_id, partition, record_offset, state, emptied_at, retry_topic, retry_number, redrives, changed_at
          FROM tidemark.failed_record
         UNION ALL
        SELECT failed_record_id, group_id, topic_id, partition, record_offset, state, emptied_at, retry_topic, retry_number, redrives, changed_at
          FROM tidemark.rewound_failed_record) record
 WHERE group_id = %(group_id)s
   AND ((topic_id, partition, record_offset) IN (SELECT topic_id, partition, record_offset FROM pg_temp.tidemark_person)
        OR state IN ('LOADED', 'SKIPPED', 'DISCARDED')
           AND (topic_id, partition, record_offset) IN (SELECT topic_id, partition, record_offset FROM pg_temp.tidemark_found));

-- name: count_failed
SELECT count(*) FROM pg_temp.tidemark_failed WHERE has_payload;

-- name: count_examples
SELECT count(*) FROM tidemark.validation_result result
 WHERE detail #> '{observed,examples}' IS NOT NULL
   AND EXISTS (SELECT FROM tidemark.validation_row
                 JOIN (TABLE pg_temp.tidemark_person UNION SELECT topic_id, partition, record_offset FROM pg_temp.tidemark_found) found
                   ON found.topic_id = kafka_topic_id AND found.partition = kafka_partition AND found.record_offset = kafka_offset
                WHERE validation_row.validation_id = result.validation_id AND validation_row.number = result.number);

-- name: empty_edits
UPDATE tidemark.failed_record_edit SET key = NULL, value = NULL, headers = '[]'
 WHERE failed_record_id IN (SELECT failed_record_id FROM pg_temp.tidemark_failed);

-- name: empty_failed
-- Discards records that are not settled: their messages stay in the retry topics, and drains skip them. Locks them as drains do.
WITH gone AS MATERIALIZED (
    SELECT failed_record_id FROM tidemark.{records} WHERE failed_record_id IN (SELECT failed_record_id FROM pg_temp.tidemark_failed)
     ORDER BY retry_topic_id, retry_partition, retry_offset, failed_record_id FOR UPDATE
)
UPDATE tidemark.{records} record
   SET key = NULL, value = NULL, headers = '[]', error_text = 'erased', story = '[]', publish_error = NULL, emptied_at = clock_timestamp(),
       due_at = NULL, state = CASE WHEN state IN ('WAITING', 'HELD', 'FAILED') THEN 'DISCARDED' ELSE state END,
       changed_at = CASE WHEN state IN ('WAITING', 'HELD', 'FAILED') THEN clock_timestamp() ELSE changed_at END
  FROM gone WHERE record.failed_record_id = gone.failed_record_id;

-- name: remove_examples
UPDATE tidemark.validation_result result SET detail = detail #- '{observed,examples}'
 WHERE detail #> '{observed,examples}' IS NOT NULL
   AND EXISTS (SELECT FROM tidemark.validation_row
                 JOIN (TABLE pg_temp.tidemark_person UNION SELECT topic_id, partition, record_offset FROM pg_temp.tidemark_found) found
                   ON found.topic_id = kafka_topic_id AND found.partition = kafka_partition AND found.record_offset = kafka_offset
                WHERE validation_row.validation_id = result.validation_id AND validation_row.number = result.number);

-- name: record
-- The erased rows of each batch, and of batches that a rewind has removed from the ledger: an undo restores them.
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
                              suppressed, not_suppressed, reason, planned_by)
VALUES (%(group_id)s, %(consumer)s, %(sink)s, %(salt)s, %(digest)s, %(sink_rows)s, %(archived_rows)s, %(overwritten_rows)s,
        %(failed_records)s, %(examples)s, %(suppressed)s, %(not_suppressed)s, %(reason)s, %(by)s)
RETURNING erasure_id;

-- name: lock
SELECT salt, digest FROM tidemark.erasure WHERE erasure_id = %(erasure_id)s FOR UPDATE;

-- name: applied
UPDATE tidemark.erasure
   SET state = 'APPLIED', applied_by = %(by)s, applied_at = clock_timestamp(), sink_rows = %(sink_rows)s, archived_rows = %(archived_rows)s,
       overwritten_rows = %(overwritten_rows)s, failed_records = %(failed_records)s, examples = %(examples)s,
       suppressed = %(suppressed)s, not_suppressed = %(not_suppressed)s
 WHERE erasure_id = %(erasure_id)s;

-- name: read
-- One erasure, or the newest ones of a consumer (null: of all consumers). Locks nothing.
SELECT erasure_id, group_id, consumer, sink, state, sink_rows, archived_rows, overwritten_rows, failed_records, examples, suppressed,
       not_suppressed, reason, planned_by, planned_at, applied_by, applied_at
  FROM tidemark.erasure
 WHERE CASE WHEN %(erasure_id)s::bigint IS NOT NULL THEN erasure_id = %(erasure_id)s
            ELSE %(consumer)s::text IS NULL OR consumer = %(consumer)s END
 ORDER BY erasure_id DESC LIMIT %(limit)s;

-- name: not_searched
-- Records of the group that were not loaded, in the ledger or removed from it: they have payloads but no rows.
SELECT (SELECT count(*) FROM tidemark.failed_record WHERE group_id = %(group_id)s AND state <> 'LOADED' AND emptied_at IS NULL)
     + (SELECT count(*) FROM tidemark.rewound_failed_record WHERE group_id = %(group_id)s AND state <> 'LOADED' AND emptied_at IS NULL);

-- name: older_rows
-- Rows from the group's topics that lie before the logs: of re-created topics, and of records that are no longer in Kafka.
SELECT (SELECT count(*) FROM {table} WHERE kafka_topic_id = ANY (%(old)s::smallint[]))
     + (SELECT coalesce(sum(found), 0)::bigint
          FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[], %(starts)s::bigint[]) log (topic_id, partition, start)
         CROSS JOIN LATERAL (SELECT count(*) AS found FROM {table}
                              WHERE kafka_topic_id = log.topic_id AND kafka_partition = log.partition AND kafka_offset < log.start) older);

-- name: group_topics
SELECT DISTINCT topic_id, name, kafka_uuid FROM tidemark.topic
 WHERE topic_id IN (SELECT topic_id FROM tidemark.partition_offset WHERE group_id = %(group_id)s AND NOT drained
                     UNION SELECT topic_id FROM pg_temp.tidemark_person);

-- name: in_logs
-- Matching records still in the logs, unless compacted: their number per partition, and the last one.
SELECT log.topic_id, log.partition, count(*) AS messages, max(record_offset) AS last
  FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[], %(starts)s::bigint[]) log (topic_id, partition, start)
  JOIN (TABLE pg_temp.tidemark_person UNION SELECT topic_id, partition, record_offset FROM pg_temp.tidemark_found) record
    ON record.topic_id = log.topic_id AND record.partition = log.partition AND record_offset >= start
 GROUP BY 1, 2;

-- name: in_hops
-- The retry topics that failed records have been published to: number of messages, and time of the last one. Before a redrive, a record may
-- have been in any of them.
SELECT topic, count(*) AS messages, max(changed_at) AS last
  FROM (SELECT failed_record_id, topic, changed_at FROM pg_temp.tidemark_failed
          JOIN unnest(%(topics)s::text[]) WITH ORDINALITY AS rung (topic, number) ON number <= retry_number OR redrives > 0
         UNION
        SELECT failed_record_id, retry_topic, changed_at FROM pg_temp.tidemark_failed WHERE retry_topic IS NOT NULL) hop
 GROUP BY 1;
