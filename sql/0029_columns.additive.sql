-- Runs that add columns to their sinks.

ALTER TABLE tidemark.attempt ADD COLUMN columns_added jsonb; -- [{"table", "columns": ["name type"]}]; null: none

CREATE FUNCTION tidemark.audit_columns() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO tidemark.audit_event (kind, group_name, dag_id, run_id, details)
    SELECT 'COLUMNS ADDED', name, NEW.dag_id, NEW.run_id, NEW.columns_added -> -1 || jsonb_build_object('attempt', NEW.attempt_id)
      FROM tidemark.consumer_group WHERE group_id = NEW.group_id;
    RETURN NULL;
END
$$;
CREATE TRIGGER audit AFTER UPDATE OF columns_added ON tidemark.attempt FOR EACH ROW EXECUTE FUNCTION tidemark.audit_columns();
REVOKE EXECUTE ON FUNCTION tidemark.audit_columns() FROM PUBLIC;

-- Roles that may update `planned` may update `columns_added` too.
DO $$
DECLARE
    runner text;
BEGIN
    FOR runner IN SELECT DISTINCT grantee FROM information_schema.role_column_grants
                   WHERE table_schema = 'tidemark' AND table_name = 'attempt' AND column_name = 'planned' AND privilege_type = 'UPDATE' LOOP
        EXECUTE format('GRANT UPDATE (columns_added) ON tidemark.attempt TO %I', runner);
    END LOOP;
END
$$;
