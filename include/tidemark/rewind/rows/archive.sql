-- Statements that move rows between a sink and the archives of rewinds. Nothing may write these rows meanwhile: they need the positions'
-- locks, except for rows that the group no longer writes.

-- name: last_number
SELECT coalesce(max(number), 0) FROM tidemark.rewind_archive WHERE rewind_id = %(rewind_id)s;

-- name: make_archive
-- A table with the sink's columns, without its indexes and constraints. Locks the sink only against changes of its columns.
CREATE TABLE {archive} (LIKE {table});
ALTER TABLE {archive} REPLICA IDENTITY FULL; -- so that a publication of all tables lets erasures delete from it

-- name: drop_archive
DROP TABLE {archive};

-- name: exists
SELECT to_regclass(%(archive)s) IS NOT NULL;

-- name: lock_archive
-- Keeps indexes, triggers, rules, policies and columns as they are. Waits for nothing that reads or moves rows.
LOCK TABLE ONLY {archive} IN ROW EXCLUSIVE MODE;

-- name: archive_problems
-- Why a relation is not a safe archive, from the catalogs alone, so that none of its code runs. Functions and operators of Postgres itself
-- are in no dependency. The sink's owner is trusted with the sink, and so with its table partitions.
WITH archive AS (SELECT * FROM pg_class WHERE oid = to_regclass(%(archive)s)),
     sink AS (SELECT * FROM pg_class WHERE oid = to_regclass(%(sink)s)),
     part AS (SELECT 'pg_class'::regclass AS classid, oid FROM archive
               UNION ALL SELECT 'pg_class'::regclass, indexrelid FROM pg_index JOIN archive ON indrelid = archive.oid
               UNION ALL SELECT 'pg_constraint'::regclass, pg_constraint.oid FROM pg_constraint JOIN archive ON conrelid = archive.oid
               UNION ALL SELECT 'pg_statistic_ext'::regclass, pg_statistic_ext.oid FROM pg_statistic_ext JOIN archive ON stxrelid = archive.oid
               UNION ALL SELECT 'pg_attrdef'::regclass, pg_attrdef.oid FROM pg_attrdef JOIN archive ON adrelid = archive.oid)
SELECT 'is not a plain table' FROM archive WHERE relkind <> 'r' OR relpersistence = 't' OR relispartition
 UNION ALL
SELECT 'has rules, row security or tables that inherit from it' FROM archive
 WHERE relrowsecurity OR relforcerowsecurity OR EXISTS (SELECT FROM pg_rewrite WHERE ev_class = archive.oid)
    OR EXISTS (SELECT FROM pg_inherits WHERE archive.oid IN (inhparent, inhrelid))
 UNION ALL
SELECT 'has the trigger ' || tgname FROM pg_trigger JOIN archive ON tgrelid = archive.oid
 UNION ALL
SELECT 'belongs to ' || pg_get_userbyid(relowner) || ', who may not create archives' FROM archive
 WHERE NOT has_schema_privilege(relowner, %(schema)s, 'CREATE') AND relowner IS DISTINCT FROM (SELECT relowner FROM sink)
 UNION ALL
SELECT 'has the column ' || kept.attname || ' of the type ' || format_type(kept.atttypid, kept.atttypmod)
  FROM archive JOIN pg_attribute kept ON kept.attrelid = archive.oid JOIN pg_type ON pg_type.oid = kept.atttypid
 WHERE kept.attnum > 0 AND NOT kept.attisdropped AND typnamespace <> 'pg_catalog'::regnamespace
   AND NOT EXISTS (SELECT FROM sink JOIN pg_attribute now ON now.attrelid = sink.oid
                    WHERE now.attname = kept.attname AND now.atttypid = kept.atttypid AND NOT now.attisdropped)
 UNION ALL
SELECT 'depends on ' || pg_describe_object(refclassid, refobjid, 0) FROM archive, part JOIN pg_depend USING (classid)
 WHERE objid = part.oid AND refclassid IN ('pg_proc'::regclass, 'pg_operator'::regclass, 'pg_opclass'::regclass, 'pg_opfamily'::regclass)
   AND archive.relowner IS DISTINCT FROM (SELECT relowner FROM sink);

-- name: take_out
-- Moves the rows of a span. Locks these rows; readers see them until the commit.
WITH gone AS (
    DELETE FROM {table} written
     WHERE written.kafka_topic_id = %(topic_id)s::smallint AND written.kafka_partition = %(partition)s
       AND written.kafka_offset >= %(start)s AND written.kafka_offset < %(end)s
    RETURNING *
)
INSERT INTO {archive} SELECT * FROM gone;

-- name: count_span
-- Counts the rows of a span. Locks nothing.
SELECT count(*) FROM {table} written
 WHERE written.kafka_topic_id = %(topic_id)s::smallint AND written.kafka_partition = %(partition)s
   AND written.kafka_offset >= %(start)s AND written.kafka_offset < %(end)s;

-- name: columns
-- The columns of an archive, except those that the sink generates. Locks nothing.
SELECT kept.attname FROM pg_attribute kept JOIN pg_attribute now USING (attname)
 WHERE kept.attrelid = to_regclass(%(archive)s) AND now.attrelid = to_regclass(%(table)s)
   AND kept.attnum > 0 AND NOT kept.attisdropped AND NOT now.attisdropped AND now.attgenerated = ''
   AND NOT (%(shadow)s AND now.attidentity <> '') -- a shadow has numbers of its own
 ORDER BY kept.attnum;

-- name: put_back
-- Locks no existing rows. Generated columns are computed again.
INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM {archive};

-- name: copy_in
-- Copies the rows of a span from a shadow into its sink. Locks no existing rows.
INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE
SELECT {columns} FROM {archive} newer
 WHERE newer.kafka_topic_id = %(topic_id)s::smallint AND newer.kafka_partition = %(partition)s
   AND newer.kafka_offset >= %(start)s AND newer.kafka_offset < %(end)s;

-- name: count_unchanged
-- Counts the rows of an archive that the sink has with the same values. Compared as text, because not every type has an equality operator.
-- Locks nothing.
SELECT count(*) FROM {archive} kept
 WHERE EXISTS (SELECT FROM {table} now
                WHERE now.kafka_topic_id = kept.kafka_topic_id AND now.kafka_partition = kept.kafka_partition
                  AND now.kafka_offset = kept.kafka_offset AND now.kafka_seq = kept.kafka_seq AND ROW({now})::text = ROW({kept})::text);

-- name: add_archive
INSERT INTO tidemark.rewind_archive (rewind_id, number, group_id, sink, relation, table_partition, rows)
VALUES (%(rewind_id)s, %(number)s, %(group_id)s, %(sink)s, %(relation)s, %(table_partition)s, %(rows)s);

-- name: add_rows
UPDATE tidemark.rewind_partition SET sink_rows = coalesce(sink_rows, 0) + %(rows)s
 WHERE rewind_id = %(rewind_id)s AND group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s;

-- name: archives
-- The archives of a rewind. Locks nothing.
SELECT rewind_id, number, group_id, sink, relation, rows, removed_at IS NOT NULL AS removed FROM tidemark.rewind_archive
 WHERE rewind_id = %(rewind_id)s AND put_back_at IS NULL AND NOT shadow ORDER BY number;

-- name: sink_archives
-- The archives of a sink of one group of a rewind. Locks their rows.
SELECT rewind_id, number, sink, relation, rows FROM tidemark.rewind_archive
 WHERE rewind_id = %(rewind_id)s AND group_id = %(group_id)s AND sink = %(sink)s AND shadow = %(shadow)s
   AND put_back_at IS NULL AND removed_at IS NULL ORDER BY number FOR UPDATE;

-- name: mark_put_back
UPDATE tidemark.rewind_archive SET put_back_at = clock_timestamp() WHERE rewind_id = %(rewind_id)s AND number = %(number)s;

-- name: table_partitions
-- The table partitions that can be moved whole, of a sink that is LIST-partitioned by Kafka partition: large ones that this role may move
-- and on which no object depends. Locks nothing.
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
   AND NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = parent.oid AND NOT tgisinternal AND tgtype & 8 <> 0) -- it sees each deleted row
   AND NOT child.relrowsecurity;

-- name: is_whole
-- Whether a table partition has rows, all of this topic and at or after this offset. Probes its lineage index.
SELECT EXISTS (SELECT FROM {leaf})
   AND NOT EXISTS (SELECT FROM {leaf} WHERE kafka_topic_id < %(topic_id)s::smallint)
   AND NOT EXISTS (SELECT FROM {leaf} WHERE kafka_topic_id > %(topic_id)s::smallint)
   AND NOT EXISTS (SELECT FROM {leaf} WHERE kafka_topic_id = %(topic_id)s::smallint AND kafka_partition = %(partition)s
                                        AND kafka_offset < %(start)s);

-- name: lock_out
-- Locks the whole sink, against readers too, until the commit. Waits for open transactions on it. Same lock order as DETACH.
LOCK TABLE ONLY {table} IN ACCESS EXCLUSIVE MODE;
LOCK TABLE {leaf} IN ACCESS EXCLUSIVE MODE;

-- name: swap
-- Moves a table partition out of its sink and puts an empty copy in its place. Needs the locks of `lock_out`.
ALTER TABLE {table} DETACH PARTITION {leaf};
ALTER TABLE {leaf} SET SCHEMA {schema};
ALTER TABLE {moved} RENAME TO {name};
CREATE TABLE {leaf} (LIKE {archive} INCLUDING ALL);
ALTER TABLE {leaf} OWNER TO {owner};
ALTER TABLE {table} ATTACH PARTITION {leaf} FOR VALUES IN ({partition});

-- name: grants
SELECT relacl::text FROM pg_class WHERE oid = to_regclass(%(leaf)s);

-- name: count
SELECT count(*) FROM {archive};
