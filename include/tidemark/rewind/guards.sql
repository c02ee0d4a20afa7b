-- Statements that look up the effects of deleting from or inserting into a user's table. Unless noted, they only read the catalogs and lock
-- nothing.

-- name: hooks
-- The triggers and rules of a table and its table partitions that fire in this session when rows are deleted or inserted.
WITH relation AS (
    SELECT to_regclass(%(table)s)::oid AS relid UNION SELECT relid FROM pg_partition_tree(to_regclass(%(table)s))
), enabled AS (
    SELECT ARRAY['A', CASE current_setting('session_replication_role') WHEN 'replica' THEN 'R' ELSE 'O' END]::"char"[] AS states
)
SELECT 'the trigger ' || tgname || ' ('
       || CASE WHEN tgtype & 2 <> 0 THEN 'BEFORE' WHEN tgtype & 64 <> 0 THEN 'INSTEAD OF' ELSE 'AFTER' END || ' ' || %(event)s || ')'
  FROM pg_trigger, enabled
 WHERE tgrelid IN (SELECT relid FROM relation) AND NOT tgisinternal AND tgparentid = 0 AND tgenabled = ANY (states)
   AND tgtype & CASE %(event)s WHEN 'DELETE' THEN 8 ELSE 4 END <> 0
 UNION ALL
SELECT 'the rule ' || rulename || ' (ON ' || %(event)s || ')'
  FROM pg_rewrite, enabled
 WHERE ev_class IN (SELECT relid FROM relation) AND ev_enabled = ANY (states)
   AND ev_type = CASE %(event)s WHEN 'DELETE' THEN '4' ELSE '3' END
 ORDER BY 1;

-- name: policies
-- The row security policies and the role, if row security applies to this role.
SELECT coalesce(string_agg(polname, ', ' ORDER BY polname), 'none, which hides every row'), current_user
  FROM (SELECT) one LEFT JOIN pg_policy ON polrelid = to_regclass(%(table)s)
HAVING row_security_active(to_regclass(%(table)s));

-- name: references
-- Foreign keys that refer to a table or one of its table partitions. ``readable``: this role may count the referring rows.
-- ``own``: the referring table is a sink of the group.
SELECT con.conrelid::bigint AS relid, format('%%I.%%I', space.nspname, child.relname) AS child, space.nspname || '.' || child.relname AS name,
       conname, confdeltype::text AS action, condeferred AS deferred, conrelid IN (SELECT to_regclass(sink) FROM unnest(%(sinks)s::text[]) sink) AS own,
       ARRAY(SELECT attname::text FROM unnest(conkey) WITH ORDINALITY AS key (number, place)
               JOIN pg_attribute ON attrelid = conrelid AND attnum = number ORDER BY place) AS referring,
       ARRAY(SELECT attname::text FROM unnest(confkey) WITH ORDINALITY AS key (number, place)
               JOIN pg_attribute ON attrelid = confrelid AND attnum = number ORDER BY place) AS referred,
       has_schema_privilege(space.oid, 'USAGE') AND has_table_privilege(child.oid, 'SELECT') AND NOT row_security_active(child.oid) AS readable
  FROM pg_constraint con
  JOIN pg_class child ON child.oid = con.conrelid
  JOIN pg_namespace space ON space.oid = child.relnamespace
 WHERE contype = 'f' AND conparentid = 0 AND to_jsonb(con) ->> 'conenforced' IS DISTINCT FROM 'false'
   AND confrelid IN (SELECT to_regclass(%(table)s)::oid UNION SELECT relid FROM pg_partition_tree(to_regclass(%(table)s)))
 ORDER BY name, conname;

-- name: meets_others
-- Whether a row of a table may conflict with a row of another record, or refers to a row of another table, which its insert locks. Identity
-- and serial columns have a new value in each row.
WITH relation AS (
    SELECT to_regclass(%(table)s)::oid AS relid UNION SELECT relid FROM pg_partition_tree(to_regclass(%(table)s))
)
SELECT EXISTS (SELECT FROM pg_constraint WHERE contype = 'f' AND conrelid IN (SELECT relid FROM relation))
    OR EXISTS (
        SELECT FROM pg_index index JOIN pg_class ON pg_class.oid = indexrelid
         CROSS JOIN LATERAL (SELECT coalesce(array_agg(attname::text), '{}') AS names,
                                    coalesce(bool_or(attidentity <> '' OR pg_get_expr(adbin, adrelid) LIKE 'nextval(%%'), false) AS numbered
                               FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
                              WHERE attrelid = indrelid AND attnum = ANY ((indkey::int2[])[0:indnkeyatts - 1])) key
         WHERE indrelid IN (SELECT relid FROM relation) AND NOT relispartition AND (indisunique OR indisexclusion)
           AND NOT numbered AND NOT names @> ARRAY['kafka_topic_id', 'kafka_partition', 'kafka_offset']);

-- name: referring
-- Counts the rows of another table that refer to rows that the rewind takes out of the sink.
SELECT count(*) FROM {child} child
 WHERE EXISTS (SELECT FROM {table} written JOIN {moving} part
                     ON written.kafka_topic_id = part.topic_id AND written.kafka_partition = part.partition
                    AND written.kafka_offset >= part.superseded_from
                WHERE part.rewind_id = %(rewind_id)s AND part.group_id = %(group_id)s AND NOT part.hold AND {same});

-- name: cascaded
-- Counts the rows that this transaction has deleted and updated in these tables, from its own statistics: a cascade makes the numbers grow.
SELECT asked.relid, sum(pg_stat_get_xact_tuples_deleted(part.relid))::bigint, sum(pg_stat_get_xact_tuples_updated(part.relid))::bigint
  FROM unnest(%(relids)s::bigint[]) AS asked (relid)
 CROSS JOIN LATERAL (SELECT asked.relid::oid UNION SELECT relid FROM pg_partition_tree(asked.relid::oid::regclass)) part (relid)
 GROUP BY asked.relid;

-- name: may_delete
SELECT has_table_privilege(to_regclass(%(table)s), 'DELETE');

-- name: sample_row
-- One row that the rewind takes out.
SELECT written.kafka_topic_id, written.kafka_partition, written.kafka_offset, written.kafka_seq
  FROM {moving} part
 CROSS JOIN LATERAL (SELECT kafka_topic_id, kafka_partition, kafka_offset, kafka_seq FROM {table} written
                      WHERE written.kafka_topic_id = part.topic_id AND written.kafka_partition = part.partition
                        AND written.kafka_offset >= part.superseded_from LIMIT 1) written
 WHERE part.rewind_id = %(rewind_id)s AND part.group_id = %(group_id)s AND NOT part.hold LIMIT 1;

-- name: delete_one
-- Locks the row.
DELETE FROM {table}
 WHERE kafka_topic_id = %(kafka_topic_id)s AND kafka_partition = %(kafka_partition)s AND kafka_offset = %(kafka_offset)s
   AND kafka_seq = %(kafka_seq)s;
