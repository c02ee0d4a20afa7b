-- Statements on records that wait for another try. Lock order: the retry topic's position, the group's advisory lock, records by message
-- offset.

-- name: lock_out_rewinds
-- Blocks rewinds of the group until this transaction ends, so that none withdraws its records. Drains and operators' actions do not block
-- each other.
SELECT pg_advisory_xact_lock_shared(%(class)s, %(group_id)s);

-- name: by_index
-- Makes the rest of the transaction find records by index. The planner's statistics may be older than a backlog: it might scan the outbox,
-- or the whole table with its history, for each portion. Locks nothing.
SELECT set_config(planner.setting, 'off', true) FROM unnest('{enable_seqscan, enable_bitmapscan, enable_sort}'::text[]) AS planner (setting);

-- name: lock_due
-- The due records whose registered messages lie in a slice of a retry topic. Locks them.
SELECT failed_record_id, retry_offset
  FROM tidemark.failed_record
 WHERE group_id = %(group_id)s AND retry_topic_id = %(topic_id)s AND retry_partition = %(partition)s
   AND retry_offset >= %(start)s AND retry_offset < %(end)s AND state = 'WAITING' AND due_at <= clock_timestamp()
 ORDER BY retry_offset FOR UPDATE;

-- name: read_due
-- The same records, with the SHA-256 of key and value. All columns are of fixed width and not null, so that the rows of a binary COPY are
-- an array. Locks nothing.
SELECT failed_record_id, retry_offset, topic_id::bigint, partition::bigint, record_offset,
       CASE WHEN isfinite(record_timestamp) THEN (extract(epoch FROM record_timestamp) * 1000)::bigint ELSE %(no_millis)s::bigint END,
       (headers::text <> '[]')::integer::bigint,
       coalesce(sha256(key), decode(repeat('00', 32), 'hex')) || coalesce(sha256(value), decode(repeat('00', 32), 'hex'))
  FROM tidemark.failed_record
 WHERE group_id = %(group_id)s AND retry_topic_id = %(topic_id)s AND retry_partition = %(partition)s
   AND retry_offset >= %(start)s AND retry_offset < %(end)s AND state = 'WAITING' AND due_at <= clock_timestamp()
 ORDER BY retry_offset;

-- name: topic_names
-- Locks nothing.
SELECT topic_id, name FROM tidemark.topic WHERE topic_id = ANY (%(topic_ids)s);

-- name: headers
-- Locks nothing.
SELECT failed_record_id, headers::text FROM tidemark.failed_record WHERE failed_record_id = ANY (%(numbers)s::bigint[]);

-- name: before
-- Records with an earlier waiting or held record of their key, with the offset of the nearest one. Written without
-- joins, because statistics may be older than a million held records, and a nested loop over them takes minutes: IS TRUE keeps the
-- subquery a hash table. Locks nothing.
WITH mine AS MATERIALIZED (
    SELECT topic_id, partition, key FROM tidemark.failed_record
     WHERE failed_record_id = ANY (%(numbers)s::bigint[]) AND key IS NOT NULL
), unsettled AS (
    SELECT failed_record_id, topic_id, partition, key, record_offset FROM tidemark.failed_record
     WHERE group_id = %(group_id)s AND state = 'WAITING'
     UNION ALL
    SELECT failed_record_id, topic_id, partition, key, record_offset FROM tidemark.failed_record
     WHERE group_id = %(group_id)s AND state = 'HELD'
), turn AS (
    SELECT failed_record_id, lag(record_offset) OVER (PARTITION BY topic_id, partition, key ORDER BY record_offset) AS before
      FROM unsettled WHERE ((topic_id, partition, key) IN (SELECT topic_id, partition, key FROM mine)) IS TRUE
)
SELECT failed_record_id, before FROM turn WHERE before IS NOT NULL AND failed_record_id = ANY (%(numbers)s::bigint[]);

-- name: blocked
-- The keys of a partition with waiting or held records, with the first such record and the number of held ones. Locks nothing.
SELECT key, min(record_offset) AS first, count(*) FILTER (WHERE state = 'HELD') AS held
  FROM (SELECT key, record_offset, state FROM tidemark.failed_record
         WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s AND state = 'WAITING'
         UNION ALL
        SELECT key, record_offset, state FROM tidemark.failed_record
         WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s AND state = 'HELD') unsettled
 WHERE key IS NOT NULL GROUP BY key;

-- name: hold
-- Holds records that are not the next ones of their keys. A release makes them WAITING again, at the same retry. Needs their locks.
UPDATE tidemark.failed_record
   SET state = 'HELD', due_at = NULL, retry_topic = NULL, retry_topic_id = NULL, retry_partition = NULL, retry_offset = NULL, publish_error = NULL
 WHERE failed_record_id = ANY (%(numbers)s::bigint[]);

-- name: any_held
-- Locks nothing.
SELECT EXISTS (SELECT FROM tidemark.failed_record WHERE group_id = %(group_id)s AND state = 'HELD');

-- name: release
-- Makes held records WAITING, due now, if no earlier record of their key is waiting. The ladder of a record never tried before begins here.
-- Locks them and skips locked ones; the next call finds those.
WITH freed AS MATERIALIZED (
    SELECT failed_record_id FROM tidemark.failed_record held
     WHERE group_id = %(group_id)s AND state = 'HELD'
       AND NOT EXISTS (SELECT FROM tidemark.failed_record before
                        WHERE before.group_id = held.group_id AND before.topic_id = held.topic_id AND before.partition = held.partition
                          AND before.key = held.key AND before.record_offset < held.record_offset AND before.state = 'WAITING')
     ORDER BY failed_record_id FOR UPDATE SKIP LOCKED
)
UPDATE tidemark.failed_record record
   SET state = 'WAITING', due_at = clock_timestamp(), retry_topic = %(topic)s,
       ladder_at = CASE WHEN retry_number = 0 THEN clock_timestamp() ELSE ladder_at END
  FROM freed WHERE record.failed_record_id = freed.failed_record_id;

-- name: succeed
-- Settles records that a retry loaded or skipped. Needs their locks.
UPDATE tidemark.failed_record record
   SET state = CASE WHEN said.rows < 0 THEN 'SKIPPED' ELSE 'LOADED' END, sink_rows = greatest(said.rows, 0), due_at = NULL, retry_topic = NULL, retry_topic_id = NULL, retry_partition = NULL,
       retry_offset = NULL, publish_error = NULL, attempt_id = %(attempt_id)s, changed_at = now, tried_at = now,
       tried_late = extract(epoch FROM now - due_at)
  FROM unnest(%(numbers)s::bigint[], %(rows)s::integer[]) AS said (failed_record_id, rows),
       (SELECT clock_timestamp() AS now) now
 WHERE record.failed_record_id = said.failed_record_id;

-- name: fail
-- Sends records that failed again to their next delay, or to the failed topic if there is no further delay, the budget would be exceeded or
-- the error is permanent. Their previous try is appended to the story. Needs their locks. Returns the number of records per state.
WITH now AS MATERIALIZED (
    SELECT clock_timestamp() AS now
), said AS MATERIALIZED (
    SELECT said.*, rung.delay, rung.topic, rung.delay IS NOT NULL AND NOT said.permanent
               AND (now - record.ladder_at + rung.delay <= %(budget)s::interval OR %(budget)s::interval IS NULL) AS climbs, now
      FROM unnest(%(numbers)s::bigint[], %(permanent)s::boolean[], %(types)s::text[], %(texts)s::text[])
               AS said (failed_record_id, permanent, type, text)
      JOIN tidemark.failed_record record USING (failed_record_id)
     CROSS JOIN now
      LEFT JOIN unnest(%(delays)s::interval[], %(topics)s::text[]) WITH ORDINALITY AS rung (delay, topic, number)
             ON rung.number = record.retry_number + 1
), changed AS (
    UPDATE tidemark.failed_record record
       SET state = CASE WHEN climbs THEN 'WAITING' ELSE 'FAILED' END,
           retry_number = CASE WHEN climbs THEN retry_number + 1 ELSE retry_number END,
           due_at = CASE WHEN climbs THEN now + delay END,
           retry_topic = CASE WHEN climbs THEN said.topic ELSE %(failed_topic)s END,
           retry_topic_id = NULL, retry_partition = NULL, retry_offset = NULL, publish_error = NULL,
           story = CASE WHEN retry_number = 0 AND redrives = 0 THEN story -- it was held; this was its first try
                        ELSE story || jsonb_build_object('number', retry_number - 1, 'type', error_type, 'text', error_text,
                                                         'attempt_id', attempt_id, 'at', changed_at) END,
           error_type = said.type, error_text = said.text, attempt_id = %(attempt_id)s, changed_at = now,
           tried_at = now, tried_late = extract(epoch FROM now - due_at)
      FROM said WHERE record.failed_record_id = said.failed_record_id
    RETURNING state
)
SELECT state, count(*) FROM changed GROUP BY state;

-- name: due
-- The readable range of each partition of the group's retry topics: up to the first registered message that is not due yet, otherwise past
-- the last one. Only partitions with due records. Locks nothing.
SELECT topic_id, topic.name AS topic, topic.kafka_uuid, partition, first, "end"
  FROM (SELECT retry_topic_id AS topic_id, retry_partition AS partition, min(retry_offset) AS first,
               coalesce(min(retry_offset) FILTER (WHERE due_at > now), max(retry_offset) + 1) AS "end"
          FROM tidemark.failed_record, (SELECT clock_timestamp() AS now) now
         WHERE group_id = %(group_id)s AND state = 'WAITING' AND retry_offset IS NOT NULL
         GROUP BY retry_topic_id, retry_partition) waiting
  JOIN tidemark.topic USING (topic_id)
 WHERE first < "end"
 ORDER BY topic.name, topic_id, partition;

-- name: publish_stranded
-- Puts waiting records back into the outbox if a drain has passed their message: it was registered late, or missing from the log at the
-- time. They are few, and found by their messages' offsets: a condition on the group would have the planner read all that wait. Locks them.
WITH passed AS MATERIALIZED (
    SELECT failed_record_id FROM tidemark.partition_offset pos
     CROSS JOIN LATERAL (SELECT failed_record_id FROM tidemark.failed_record
                          WHERE retry_topic_id = pos.topic_id AND retry_partition = pos.partition AND retry_offset < pos.next_offset
                            AND state = 'WAITING' FOR UPDATE) record
     WHERE pos.group_id = %(group_id)s AND pos.drained
)
UPDATE tidemark.failed_record record SET retry_topic_id = NULL, retry_partition = NULL, retry_offset = NULL
  FROM passed WHERE record.failed_record_id = passed.failed_record_id;

-- name: publish_gone
-- Puts waiting records back into the outbox if their registered message is gone from the log. Locks them.
UPDATE tidemark.failed_record SET retry_topic_id = NULL, retry_partition = NULL, retry_offset = NULL
 WHERE group_id = %(group_id)s AND state = 'WAITING' AND retry_topic_id = %(topic_id)s
   AND (retry_partition = %(partition)s OR %(partition)s::integer IS NULL) AND (retry_offset < %(before)s OR %(before)s::bigint IS NULL);
