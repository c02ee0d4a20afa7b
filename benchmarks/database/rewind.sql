-- name: rows
SELECT number AS event_id, '2026-01-01T00:00:00Z'::timestamptz + number * interval '1 ms' AS happened_at,
       'customer-' || lpad((number * 7919 %% 100000)::text, 6, '0') AS customer, 'purchase' AS kind,
       number %% 100000 / 100.0::double precision AS amount, (number %% 20)::integer AS quantity, 'lorem ipsum dolor sit amet' AS note,
       %(topic)s::smallint AS kafka_topic_id, (number %% %(partitions)s)::integer AS kafka_partition,
       number / %(partitions)s AS kafka_offset, 0 AS kafka_seq
  FROM generate_series(0, %(each)s::bigint * %(partitions)s - 1) number

-- name: forget
DELETE FROM tidemark.batch WHERE group_id = %(group)s

-- name: position
UPDATE tidemark.partition_offset SET next_offset = %(each)s, validated_offset = 0 WHERE group_id = %(group)s

-- name: ledger
INSERT INTO tidemark.batch (group_id, topic_id, partition, start_offset, end_offset, owner_epoch, attempt_id,
                            loaded, skipped, retried, failed, unaccounted, sink_rows)
SELECT group_id, topic_id, partition, start, least(start + %(batch)s, next_offset), owner_epoch, %(attempt)s,
       least(start + %(batch)s, next_offset) - start, 0, 0, 0, 0, least(start + %(batch)s, next_offset) - start
  FROM tidemark.partition_offset CROSS JOIN LATERAL generate_series(0, next_offset - 1, %(batch)s) start WHERE group_id = %(group)s

-- name: look
SELECT count(*) FROM {table} WHERE kafka_topic_id = %(topic)s::smallint AND kafka_partition = 0 AND kafka_offset = 1

-- name: commit
UPDATE tidemark.partition_offset SET committed_at = clock_timestamp() WHERE group_id = %(group)s AND topic_id = %(topic)s AND partition = 0
