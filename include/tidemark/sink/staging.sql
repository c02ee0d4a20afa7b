-- Statements on staging tables, tidemark_staging.staged_<attempt>_<number>_<random>.

-- name: left_behind
-- Staging tables that killed drivers left behind: their attempts have ended. Locks nothing.
SELECT relnamespace::regnamespace || '.' || relname FROM pg_class
 WHERE relnamespace = 'tidemark_staging'::regnamespace AND relkind = 'r'
   AND relname ~ '^staged_[0-9]+_[0-9]+(_[0-9a-f]+)?$' AND pg_has_role(relowner, 'USAGE')
   AND EXISTS (SELECT FROM tidemark.attempt WHERE attempt_id::text = split_part(relname, '_', 2) AND state <> 'RUNNING');

-- name: make_staging
CREATE UNLOGGED TABLE {table} AS SELECT {columns} FROM {sinks} WITH NO DATA;
