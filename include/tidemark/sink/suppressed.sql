-- Statements on erased records and keys, which must stay out of a sink.

-- name: records
-- The suppressed records of a slice. First waits for an erasure of the group, and blocks new ones until the end of the transaction: so an
-- erasure finds all rows of earlier commits, and later commits find all records that it has suppressed. A side group loads no record that
-- is suppressed for its group.
SELECT pg_advisory_xact_lock_shared(%(class)s, %(group_id)s);
SELECT record_offset FROM tidemark.suppressed
 WHERE group_id = (SELECT coalesce(side_of, group_id) FROM tidemark.consumer_group WHERE group_id = %(group_id)s) AND topic_id = %(topic_id)s AND partition = %(partition)s
   AND record_offset >= %(start)s AND record_offset < %(end)s;

-- name: any_keys
-- Whether keys are suppressed in one of these slices. One index lookup per slice: max() and the order make the planner use the index. Locks
-- nothing.
SELECT EXISTS (SELECT FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[], %(starts)s::bigint[]) part (topic_id, partition, start)
                WHERE start < (SELECT max(below) FROM tidemark.suppressed_key erased
                                WHERE erased.sink = %(sink)s AND erased.topic_id = part.topic_id AND erased.partition = part.partition)),
       (SELECT salt FROM tidemark.suppressed_key WHERE sink = %(sink)s ORDER BY topic_id, partition, below LIMIT 1);

-- name: other_keys
-- The rows of a source whose keys are not suppressed. Part of other statements.
(SELECT * FROM {source} AS newer WHERE NOT EXISTS (
    SELECT FROM tidemark.suppressed_key erased
     WHERE erased.sink = {sink} AND erased.topic_id = newer.kafka_topic_id AND erased.partition = newer.kafka_partition
       AND erased.digest = {digest} AND erased.below > newer.kafka_offset))

-- name: skip_staged
-- Staged rows of suppressed records: the records are skipped.
UPDATE pg_temp.tidemark_staged staged SET disposition = 'skip', error = NULL
  FROM tidemark.suppressed
 WHERE suppressed.group_id = (SELECT coalesce(side_of, group_id) FROM tidemark.consumer_group WHERE group_id = %(group_id)s)
   AND suppressed.topic_id = staged.kafka_topic_id AND suppressed.partition = staged.kafka_partition
   AND suppressed.record_offset = staged.kafka_offset;
