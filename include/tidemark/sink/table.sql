-- name: columns
-- The columns of a table in order, with domains (also nested ones) resolved to their base type. Takes no lock that blocks readers.
WITH RECURSIVE resolved AS (
    SELECT attnum, attname, atttypid AS type, atttypmod AS modifier, attnotnull AS not_null, atthasdef OR attidentity <> '' AS has_default,
           attgenerated <> '' OR attidentity = 'a' AS generated
      FROM pg_attribute WHERE attrelid = to_regclass(%(table)s) AND attnum > 0 AND NOT attisdropped
     UNION ALL
    SELECT attnum, attname, domain.typbasetype, domain.typtypmod, not_null OR domain.typnotnull, has_default OR domain.typdefault IS NOT NULL,
           generated
      FROM resolved JOIN pg_type domain ON domain.oid = resolved.type WHERE domain.typtype = 'd'
)
SELECT attname AS name, CASE WHEN kind.typtype = 'e' THEN 'enum' ELSE format_type(type, modifier) END AS type,
       not_null, has_default, generated
  FROM resolved JOIN pg_type kind ON kind.oid = resolved.type
 WHERE kind.typtype <> 'd'
 ORDER BY attnum;

-- name: partition_key
-- The columns by which a table is partitioned. Postgres requires them in each unique index of such a table.
SELECT attname::text FROM pg_partitioned_table
  JOIN pg_attribute ON attrelid = partrelid AND attnum = ANY (partattrs::int2[])
 WHERE partrelid = to_regclass(%(table)s) ORDER BY attnum;

-- name: unique_index
-- Whether there is a valid unique index on exactly these columns, in any order, that is not deferrable.
SELECT EXISTS (
    SELECT FROM pg_index index
     WHERE index.indrelid = to_regclass(%(table)s) AND index.indisunique AND index.indisvalid AND index.indimmediate
       AND index.indpred IS NULL AND index.indexprs IS NULL
       AND (SELECT array_agg(attname::text ORDER BY attname) FROM pg_attribute
             WHERE attrelid = index.indrelid AND attnum = ANY ((index.indkey::int2[])[0:index.indnkeyatts - 1]))
           = (SELECT array_agg(name ORDER BY name) FROM unnest(%(columns)s::text[]) AS name)
);

-- name: publication
-- A publication that makes Postgres refuse updates and deletes in the table or a partition, because there is no replica identity.
SELECT pubname
  FROM (SELECT to_regclass(%(table)s)::oid AS relid UNION SELECT relid FROM pg_partition_tree(to_regclass(%(table)s))) AS part
  JOIN pg_class ON pg_class.oid = relid
  JOIN pg_namespace ON pg_namespace.oid = relnamespace
  JOIN pg_publication_tables ON schemaname = nspname AND tablename = relname
  JOIN pg_publication USING (pubname)
 WHERE (pubupdate OR pubdelete)
   AND (relreplident = 'n' OR (relreplident = 'd' AND NOT EXISTS (SELECT FROM pg_index WHERE indrelid = relid AND indisprimary)))
 ORDER BY pubname LIMIT 1;

-- name: kind
-- The kind of a relation that is not a table; null for a table or partitioned table.
SELECT CASE relkind WHEN 'v' THEN 'view' WHEN 'm' THEN 'materialized view' WHEN 'f' THEN 'foreign table' END
  FROM pg_class WHERE oid = to_regclass(%(table)s);

-- name: row_security
-- One row if row-level security applies to this role on the table.
SELECT true WHERE row_security_active(to_regclass(%(table)s));

-- name: lineage
-- The lineage of a table's rows. Part of other statements.
SELECT kafka_topic_id, kafka_partition, kafka_offset, kafka_seq FROM {table}
