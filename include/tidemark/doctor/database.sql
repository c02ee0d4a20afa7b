-- Statements of `tidemark doctor`. They only read.

-- name: server
SELECT current_setting('server_version') AS version, session_user AS role, pg_is_in_recovery() AS replica,
       current_setting('transaction_read_only') = 'on' AS read_only,
       extract(epoch FROM current_setting('statement_timeout')::interval) AS statement_timeout_s,
       current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer AS max_sessions,
       current_setting('fsync') AS fsync, current_setting('synchronous_commit') AS synchronous_commit;

-- name: clock
SELECT extract(epoch FROM clock_timestamp())::double precision;

-- name: sessions
SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend';

-- name: sink
-- ``missing``: privileges on a sink that a run needs and this role lacks; ``mine``: the role has the owner's rights. No row: no such table.
SELECT array(SELECT wanted FROM unnest(%(privileges)s::text[]) wanted WHERE NOT has_table_privilege(sink.oid, wanted)) AS missing,
       pg_has_role(sink.relowner, 'USAGE') AS mine
  FROM pg_class sink JOIN pg_namespace space ON space.oid = sink.relnamespace
 WHERE space.nspname = %(schema)s AND sink.relname = %(table)s;

-- name: kept
-- The data that `tidemark maintain` removes: archives and payloads, the number of overdue archives, and when it last ended.
SELECT (SELECT count(*) FROM tidemark.rewind_archive WHERE put_back_at IS NULL AND removed_at IS NULL) AS archives,
       (SELECT coalesce(sum(pg_total_relation_size(CASE WHEN relation ~ '^tidemark(_archive)?\.rewound_\d+_\d+$' THEN to_regclass(relation) END)), 0)::bigint
          FROM tidemark.rewind_archive WHERE put_back_at IS NULL AND removed_at IS NULL) AS archive_bytes,
       (SELECT count(*) FROM tidemark.rewind_archive archive JOIN tidemark.rewind USING (rewind_id)
         WHERE put_back_at IS NULL AND removed_at IS NULL AND applied_at < clock_timestamp() - %(overdue)s::interval) AS overdue,
       pg_total_relation_size('tidemark.failed_record') AS failed_bytes,
       (SELECT max(ended_at) FROM tidemark.maintenance) AS maintained_at;
