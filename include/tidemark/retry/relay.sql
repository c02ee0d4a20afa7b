-- Statements of the relay. It locks rows of failed_record in id order, and skips rows that are already locked.

-- name: idle_limit
-- A relay that is idle inside its transaction for this long loses its session, and so its row locks. Locks nothing.
SELECT set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true);

-- name: outbox_topics
-- The topics with records to publish. Locks nothing.
SELECT DISTINCT retry_topic FROM tidemark.failed_record
 WHERE group_id = %(group_id)s
   AND retry_offset IS NULL AND retry_topic IS NOT NULL AND publish_error IS NULL AND state IN ('WAITING', 'FAILED') ORDER BY 1;

-- name: known
-- The known incarnations of these topics. Locks nothing.
SELECT name, kafka_uuid FROM tidemark.topic WHERE name = ANY (%(names)s);

-- name: published
-- The partitions that hold messages of waiting records, with the first such message. Locks nothing.
SELECT retry_topic AS topic, retry_topic_id AS topic_id, topic.kafka_uuid, retry_partition AS partition, min(retry_offset) AS first
  FROM tidemark.failed_record JOIN tidemark.topic ON topic.topic_id = retry_topic_id
 WHERE group_id = %(group_id)s AND state = 'WAITING' AND retry_offset IS NOT NULL
 GROUP BY retry_topic, retry_topic_id, topic.kafka_uuid, retry_partition ORDER BY 1, 2, 4;

-- name: take
-- The next records to publish, up to a number of records and bytes, but at least one. Locks them.
WITH taken AS MATERIALIZED (
    SELECT failed_record_id, topic_id, partition, record_offset,
           CASE WHEN isfinite(record_timestamp) THEN (extract(epoch FROM record_timestamp) * 1000)::bigint END AS record_millis,
           key, value, nullif(headers::text, '[]') AS headers, error_type, error_text, retry_number,
           floor(extract(epoch FROM due_at) * 1000)::bigint AS due_millis, retry_topic,
           coalesce(octet_length(key), 0) + coalesce(octet_length(value), 0) + octet_length(headers::text) AS octets
      FROM tidemark.failed_record
     WHERE group_id = %(group_id)s AND failed_record_id > %(after)s AND failed_record_id <= %(upto)s AND retry_topic = ANY (%(topics)s)
       AND retry_offset IS NULL AND retry_topic IS NOT NULL AND publish_error IS NULL AND state IN ('WAITING', 'FAILED')
     ORDER BY failed_record_id LIMIT %(records)s
       FOR UPDATE SKIP LOCKED
), measured AS (
    SELECT *, sum(octets) OVER (ORDER BY failed_record_id) - octets AS before FROM taken
)
SELECT failed_record_id, topic.name, partition, record_offset, record_millis, key, value, headers, error_type, error_text, retry_number,
       due_millis, retry_topic
  FROM measured JOIN tidemark.topic USING (topic_id) WHERE before < %(bytes)s ORDER BY failed_record_id;

-- name: note_stored
-- Registers the messages: from now on, only these are tried. Needs the rows' locks.
UPDATE tidemark.failed_record SET retry_topic_id = stored.topic_id, retry_partition = stored.partition, retry_offset = stored.offset_
  FROM unnest(%(ids)s::bigint[], %(topic_ids)s::smallint[], %(partitions)s::integer[], %(offsets)s::bigint[])
       AS stored (failed_record_id, topic_id, partition, offset_)
 WHERE failed_record.failed_record_id = stored.failed_record_id;

-- name: note_refused
-- Marks records that the broker rejected. They keep their state, and are not published again until an operator changes them. Needs the locks.
UPDATE tidemark.failed_record SET publish_error = refused.text
  FROM unnest(%(ids)s::bigint[], %(texts)s::text[]) AS refused (failed_record_id, text)
 WHERE failed_record.failed_record_id = refused.failed_record_id;
