-- Statements that find rows of another group in a table. They lock nothing.

-- name: readable
-- Whether the table exists and this role may read it.
SELECT has_table_privilege(to_regclass(%(table)s), 'SELECT');

-- name: has_rows
SELECT EXISTS (SELECT FROM {table} WHERE kafka_topic_id = %(topic_id)s AND kafka_partition = %(partition)s
                                     AND kafka_offset >= %(start)s AND kafka_offset < %(end)s);

-- name: loader
-- The other group that committed last in this partition.
SELECT grp.name FROM tidemark.batch JOIN tidemark.consumer_group grp USING (group_id)
 WHERE topic_id = %(topic_id)s AND partition = %(partition)s AND group_id <> %(group_id)s ORDER BY batch_id DESC LIMIT 1;

-- name: unread_partitions
-- Partitions of these topics that other groups have read, and in which this group, which may be new (number 0), has no position.
SELECT DISTINCT coalesce(mine.group_id, 0), topic_id, topic.name, partition
  FROM tidemark.topic JOIN tidemark.partition_offset read USING (topic_id)
  LEFT JOIN tidemark.consumer_group mine ON mine.name = %(group)s
 WHERE topic.name = ANY (%(topics)s::text[]) AND NOT read.drained
   AND NOT EXISTS (SELECT FROM tidemark.partition_offset own
                    WHERE own.group_id = mine.group_id AND own.topic_id = read.topic_id AND own.partition = read.partition)
 ORDER BY topic_id, partition;
