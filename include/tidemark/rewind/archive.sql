-- Statements that move rows between a sink and the archives of rewinds. Needs the positions' locks: nobody writes these rows meanwhile.

-- name: last_number
SELECT coalesce(max(number), 0) FROM tidemark.rewind_archive WHERE rewind_id = %(rewind_id)s;

-- name: make_archive
-- A table like the sink, without its indexes and constraints. Locks the sink against changes of its columns only.
CREATE TABLE {archive} (LIKE {table});

-- name: drop_archive
DROP TABLE {archive};

-- name: take_out
-- Moves the rows of a partition from an offset on. Locks these rows; readers go on seeing them until the commit.
WITH gone AS (
    DELETE FROM {table} written
     WHERE written.kafka_topic_id = %(topic_id)s::smallint AND written.kafka_partition = %(partition)s
       AND written.kafka_offset >= %(start)s
    RETURNING *
)
INSERT INTO {archive} SELECT * FROM gone;

-- name: there
-- How many rows of a partition there are from an offset on. Locks nothing.
SELECT count(*) FROM {table} written
 WHERE written.kafka_topic_id = %(topic_id)s::smallint AND written.kafka_partition = %(partition)s AND written.kafka_offset >= %(start)s;

-- name: columns
-- The columns of an archive, but those that the sink fills in by itself. Locks nothing.
SELECT kept.attname FROM pg_attribute kept JOIN pg_attribute now USING (attname)
 WHERE kept.attrelid = to_regclass(%(archive)s) AND now.attrelid = to_regclass(%(table)s)
   AND kept.attnum > 0 AND NOT kept.attisdropped AND NOT now.attisdropped AND now.attgenerated = ''
 ORDER BY kept.attnum;

-- name: put_back
-- Locks nothing that is there. Columns that the sink fills in by itself are filled in again.
INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM {archive};

-- name: as_they_were
-- How many rows of an archive the sink has, value by value. As text, because not every type knows equality. Locks nothing.
SELECT count(*) FROM {archive} kept
 WHERE EXISTS (SELECT FROM {table} now
                WHERE now.kafka_topic_id = kept.kafka_topic_id AND now.kafka_partition = kept.kafka_partition
                  AND now.kafka_offset = kept.kafka_offset AND now.kafka_seq = kept.kafka_seq AND ROW({now})::text = ROW({kept})::text);

-- name: note_archive
INSERT INTO tidemark.rewind_archive (rewind_id, number, group_id, sink, relation, table_partition, rows)
VALUES (%(rewind_id)s, %(number)s, %(group_id)s, %(sink)s, %(relation)s, %(table_partition)s, %(rows)s);

-- name: note_rows
UPDATE tidemark.rewind_partition SET sink_rows = %(rows)s
 WHERE rewind_id = %(rewind_id)s AND group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s;

-- name: kept
-- The archives of a rewind, of one group. Locks their rows.
SELECT number, relation, rows FROM tidemark.rewind_archive
 WHERE rewind_id = %(rewind_id)s AND group_id = %(group_id)s AND put_back_at IS NULL AND removed_at IS NULL ORDER BY number FOR UPDATE;

-- name: note_put_back
UPDATE tidemark.rewind_archive SET put_back_at = clock_timestamp() WHERE rewind_id = %(rewind_id)s AND number = %(number)s;

-- name: table_partitions
-- The partitions of a sink that is LIST-partitioned by Kafka partition which are large, which this role may move, and on which nothing
-- hangs that would not come along. Locks nothing.
SELECT pg_get_expr(child.relpartbound, child.oid) AS bound, space.nspname AS schema, child.relname AS name,
       child.relowner::regrole::text AS owner, child.relacl::text AS grants
  FROM pg_partitioned_table parted
  JOIN pg_class parent ON parent.oid = parted.partrelid
  JOIN pg_inherits ON inhparent = parent.oid
  JOIN pg_class child ON child.oid = inhrelid
  JOIN pg_namespace space ON space.oid = child.relnamespace
 WHERE parent.oid = to_regclass(%(table)s) AND partstrat = 'l' AND partnatts = 1
   AND partattrs[0] = (SELECT attnum FROM pg_attribute WHERE attrelid = parent.oid AND attname = 'kafka_partition')
   AND child.relkind = 'r' AND child.reltuples >= %(least)s AND child.relpersistence = 'p'
   AND pg_has_role(parent.relowner, 'USAGE') AND pg_has_role(child.relowner, 'USAGE')
   AND NOT EXISTS (SELECT FROM pg_depend WHERE refobjid = child.oid AND classid = 'pg_rewrite'::regclass)
   AND NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = child.oid AND tgparentid = 0 AND NOT tgisinternal)
   AND NOT EXISTS (SELECT FROM pg_constraint WHERE conrelid = child.oid AND contype = 'f' AND conparentid = 0)
   AND NOT EXISTS (SELECT FROM pg_constraint WHERE confrelid IN (parent.oid, child.oid) AND contype = 'f')
   AND NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = parent.oid AND NOT tgisinternal AND tgtype & 8 <> 0) -- it sees each row that goes
   AND NOT child.relrowsecurity;

-- name: is_whole
-- Has a table partition rows, and is every one of this topic and at or behind this offset? Probes of its lineage index.
SELECT EXISTS (SELECT FROM {leaf})
   AND NOT EXISTS (SELECT FROM {leaf} WHERE kafka_topic_id < %(topic_id)s::smallint)
   AND NOT EXISTS (SELECT FROM {leaf} WHERE kafka_topic_id > %(topic_id)s::smallint)
   AND NOT EXISTS (SELECT FROM {leaf} WHERE kafka_topic_id = %(topic_id)s::smallint AND kafka_partition = %(partition)s
                                        AND kafka_offset < %(start)s);

-- name: lock_out
-- Locks the whole sink, against readers too, from here to the commit; an open transaction on it is waited for. In the order of DETACH.
LOCK TABLE ONLY {table} IN ACCESS EXCLUSIVE MODE;
LOCK TABLE {leaf} IN ACCESS EXCLUSIVE MODE;

-- name: swap
-- Takes a table partition out of its sink, as it is, and puts an empty one like it in its place. Needs the locks of `lock_out`.
ALTER TABLE {table} DETACH PARTITION {leaf};
ALTER TABLE {leaf} SET SCHEMA tidemark;
ALTER TABLE {moved} RENAME TO {name};
CREATE TABLE {leaf} (LIKE {archive} INCLUDING ALL);
ALTER TABLE {leaf} OWNER TO {owner};
ALTER TABLE {table} ATTACH PARTITION {leaf} FOR VALUES IN ({partition});

-- name: grants
SELECT relacl::text FROM pg_class WHERE oid = to_regclass(%(leaf)s);

-- name: count
SELECT count(*) FROM {archive};
