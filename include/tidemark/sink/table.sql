-- name: columns
-- The columns of a table in order, domains resolved to their base type. Locks nothing that a reader minds.
SELECT attribute.attname AS name,
       CASE WHEN kind.typtype = 'e' THEN 'enum'
            WHEN kind.typtype = 'd' THEN format_type(kind.typbasetype, kind.typtypmod)
            ELSE format_type(attribute.atttypid, attribute.atttypmod) END AS type,
       attribute.attnotnull OR kind.typnotnull AS not_null,
       attribute.atthasdef OR attribute.attidentity <> '' AS has_default,
       attribute.attgenerated <> '' OR attribute.attidentity = 'a' AS generated
  FROM pg_attribute attribute JOIN pg_type kind ON kind.oid = attribute.atttypid
 WHERE attribute.attrelid = to_regclass(%(table)s) AND attribute.attnum > 0 AND NOT attribute.attisdropped
 ORDER BY attribute.attnum;

-- name: lineage_index
-- Is there a valid unique index on exactly the lineage columns?
SELECT EXISTS (
    SELECT FROM pg_index index
     WHERE index.indrelid = to_regclass(%(table)s) AND index.indisunique AND index.indisvalid AND index.indpred IS NULL
       AND index.indexprs IS NULL AND index.indnkeyatts = 4
       AND (SELECT array_agg(attname::text ORDER BY attname) FROM pg_attribute
             WHERE attrelid = index.indrelid AND attnum = ANY ((index.indkey::int2[])[0:3]))
           = ARRAY['kafka_offset', 'kafka_partition', 'kafka_seq', 'kafka_topic_id']
);

-- name: may_insert
SELECT has_table_privilege(to_regclass(%(table)s), 'INSERT');
