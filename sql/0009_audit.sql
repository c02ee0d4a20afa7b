-- The audit log. Triggers write it, in the action's transaction.

-- One row per run of `tidemark maintain` that removed something, or that has not ended.
CREATE TABLE tidemark.maintenance (
    maintenance_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    done_by        text        NOT NULL CHECK (done_by <> ''),
    dag_id         text,
    run_id         text,
    keep           interval    NOT NULL, -- what is older goes
    begun_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at       timestamptz,          -- null: it still runs, or was killed
    archives       integer     NOT NULL DEFAULT 0 CHECK (archives >= 0),
    rows           bigint      NOT NULL DEFAULT 0 CHECK (rows >= 0), -- in these archives
    payloads       bigint      NOT NULL DEFAULT 0 CHECK (payloads >= 0) -- of settled records
);

-- One row per action. Only the triggers below and the owner write it.
CREATE TABLE tidemark.audit_event (
    event_id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at            timestamptz NOT NULL DEFAULT clock_timestamp(),
    kind          text        NOT NULL,
    group_name    text,                                  -- null: the whole database
    database_role text        NOT NULL DEFAULT session_user,
    claimed_by    text,                                  -- the user, as Airflow or the shell names it; null: nobody was named
    dag_id        text,
    run_id        text,
    plan          bigint,                                -- number of the rewind or the redrive
    digest        text,                                  -- of the rewind's plan
    reason        text,
    details       jsonb       NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(details) = 'object') -- numbers and names, never a payload
);
CREATE INDEX audit_event_at ON tidemark.audit_event (at);
CREATE INDEX audit_event_group ON tidemark.audit_event (group_name, event_id);
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON tidemark.audit_event
    FOR EACH STATEMENT EXECUTE FUNCTION tidemark.append_only();

-- Default privileges of the schema may have given roles more than SELECT. A role that could write role_profile would get any profile from the
-- owner's next migration.
DO $$
DECLARE
    held record;
BEGIN
    FOR held IN SELECT table_name, grantee, privilege_type FROM information_schema.role_table_grants
                 WHERE table_schema = 'tidemark' AND table_name IN ('role_profile', 'audit_event')
                   AND grantee <> current_user AND privilege_type <> 'SELECT' LOOP
        EXECUTE format('REVOKE %s ON tidemark.%I FROM %s', held.privilege_type, held.table_name,
                       CASE WHEN held.grantee = 'PUBLIC' THEN 'PUBLIC' ELSE quote_ident(held.grantee) END);
    END LOOP;
END
$$;

-- The triggers run as the owner: no other role has INSERT on the log. `tidemark.claimed_by` and `tidemark.reason` are settings of the
-- transaction, for actions whose rows do not name them.

CREATE FUNCTION tidemark.audit_rewind() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_TABLE_NAME = 'rewind_group' THEN
        INSERT INTO tidemark.audit_event (kind, group_name, claimed_by, dag_id, run_id, plan, digest, reason, details)
        SELECT 'REWIND ' || state, NEW.group_name, planned_by, dag_id, run_id, rewind_id, digest, reason,
               jsonb_strip_nulls(jsonb_build_object('scenario', scenario, 'undo_of', undo_of, 'sink', NEW.sink))
          FROM tidemark.rewind WHERE rewind_id = NEW.rewind_id;
    ELSE
        INSERT INTO tidemark.audit_event (kind, group_name, claimed_by, dag_id, run_id, plan, digest, reason, details)
        SELECT 'REWIND ' || NEW.state, grp.group_name, CASE NEW.state WHEN 'REJECTED' THEN NEW.decided_by WHEN 'BESIDE' THEN NEW.started_by
                              WHEN 'DISCARDED' THEN nullif(current_setting('tidemark.claimed_by', true), '') ELSE NEW.applied_by END,
               NEW.dag_id, NEW.run_id, NEW.rewind_id, NEW.digest,
               coalesce(CASE WHEN NEW.state = 'DISCARDED' THEN nullif(current_setting('tidemark.reason', true), '') END, NEW.reason),
               jsonb_strip_nulls(jsonb_build_object('approved_by', CASE WHEN NEW.state IN ('APPLIED', 'BESIDE') THEN NEW.decided_by END,
                                                    'undo_of', NEW.undo_of, 'sink', grp.sink, 'partitions', part.partitions,
                                                    'sink_rows', part.sink_rows, 'failed_records', part.failed_records))
          FROM tidemark.rewind_group grp
         CROSS JOIN LATERAL (SELECT count(*) AS partitions, sum(sink_rows) AS sink_rows, sum(failed_records) AS failed_records
                               FROM tidemark.rewind_partition WHERE rewind_id = NEW.rewind_id AND group_id = grp.group_id) part
         WHERE grp.rewind_id = NEW.rewind_id AND NEW.state <> 'UNDONE';
        INSERT INTO tidemark.audit_event (kind, group_name, claimed_by, dag_id, run_id, plan, digest, reason, details)
        SELECT 'REWIND UNDONE', grp.group_name, NEW.applied_by, NEW.dag_id, NEW.run_id, NEW.undo_of, undone.digest, NEW.reason,
               jsonb_build_object('undone_by', NEW.rewind_id)
          FROM tidemark.rewind undone JOIN tidemark.rewind_group grp USING (rewind_id)
         WHERE undone.rewind_id = NEW.undo_of AND NEW.state = 'APPLIED';
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER audit AFTER INSERT ON tidemark.rewind_group FOR EACH ROW EXECUTE FUNCTION tidemark.audit_rewind();
CREATE TRIGGER audit AFTER UPDATE OF state ON tidemark.rewind
    FOR EACH ROW WHEN (OLD.state <> NEW.state) EXECUTE FUNCTION tidemark.audit_rewind();

CREATE FUNCTION tidemark.audit_redrive() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO tidemark.audit_event (kind, group_name, claimed_by, dag_id, run_id, plan, digest, reason, details)
    SELECT 'REDRIVE ' || CASE NEW.state WHEN 'RUNNING' THEN 'STARTED' ELSE NEW.state END, grp.name,
           CASE WHEN TG_OP = 'INSERT' THEN NEW.planned_by ELSE nullif(current_setting('tidemark.claimed_by', true), '') END,
           NEW.dag_id, NEW.run_id, NEW.redrive_id, NEW.digest, coalesce(nullif(current_setting('tidemark.reason', true), ''), NEW.reason),
           jsonb_strip_nulls(jsonb_build_object('destination', NEW.destination, 'approved_by', NEW.approved_by, 'redriven', done.redriven))
      FROM tidemark.consumer_group grp
     CROSS JOIN LATERAL (SELECT CASE WHEN NEW.state IN ('STOPPED', 'DONE') THEN count(*) END AS redriven FROM tidemark.redrive_record
                          WHERE NEW.state IN ('STOPPED', 'DONE') AND redrive_id = NEW.redrive_id AND state = 'REDRIVEN') done
     WHERE grp.group_id = NEW.group_id;
    RETURN NULL;
END
$$;
CREATE TRIGGER audit AFTER INSERT OR UPDATE OF state ON tidemark.redrive FOR EACH ROW EXECUTE FUNCTION tidemark.audit_redrive();

-- At the end of the transaction, because a discard's records are counted after its row was written. A redrive has events of its own.
CREATE FUNCTION tidemark.audit_retry_action() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO tidemark.audit_event (kind, group_name, claimed_by, reason, details)
    SELECT action.kind, grp.name, action.done_by, action.reason, jsonb_build_object('action', action.action_id, 'records', action.records)
      FROM tidemark.retry_action action JOIN tidemark.consumer_group grp USING (group_id) WHERE action_id = NEW.action_id;
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER audit AFTER INSERT ON tidemark.retry_action DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.kind IN ('DISCARD', 'EDIT')) EXECUTE FUNCTION tidemark.audit_retry_action();

CREATE FUNCTION tidemark.audit_flow() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO tidemark.audit_event (kind, group_name, claimed_by, reason, details)
    SELECT CASE WHEN NEW.paused AND (TG_OP = 'INSERT' OR NOT OLD.paused) THEN 'FLOW PAUSED'
                WHEN TG_OP = 'UPDATE' AND OLD.paused AND NOT NEW.paused THEN 'FLOW RESUMED' ELSE 'FLOW CHANGED' END,
           grp.name, nullif(current_setting('tidemark.claimed_by', true), ''), nullif(NEW.reason, ''),
           jsonb_strip_nulls(jsonb_build_object('topic', NEW.topic, 'partition', NEW.partition, 'priority', nullif(NEW.priority, 0),
                                                'max_ahead', NEW.max_ahead::text))
      FROM tidemark.consumer_group grp WHERE grp.group_id = NEW.group_id;
    RETURN NULL;
END
$$;
CREATE TRIGGER audit AFTER INSERT OR UPDATE ON tidemark.flow FOR EACH ROW EXECUTE FUNCTION tidemark.audit_flow();

CREATE FUNCTION tidemark.audit_group() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_TABLE_NAME = 'consumer_group' THEN
        INSERT INTO tidemark.audit_event (kind, group_name, claimed_by, details)
        VALUES ('GROUP DELETED', OLD.name, nullif(current_setting('tidemark.claimed_by', true), ''), jsonb_build_object('kept_as', NEW.name));
    ELSE
        INSERT INTO tidemark.audit_event (kind, group_name, claimed_by, details)
        SELECT 'OFFSETS DELETED', grp.name, nullif(current_setting('tidemark.claimed_by', true), ''),
               jsonb_build_object('topic', topic.name, 'partition', OLD.partition, 'next_offset', OLD.next_offset)
          FROM tidemark.consumer_group grp, tidemark.topic WHERE grp.group_id = OLD.group_id AND topic.topic_id = OLD.topic_id;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER audit AFTER UPDATE OF name ON tidemark.consumer_group FOR EACH ROW EXECUTE FUNCTION tidemark.audit_group();
CREATE TRIGGER audit AFTER DELETE ON tidemark.partition_offset FOR EACH ROW EXECUTE FUNCTION tidemark.audit_group();

-- `tidemark.removed_members` is a setting of the transaction: the ids, as a JSON array, of the members that an operator removes. Members
-- that leave or expire are deleted without it.
CREATE FUNCTION tidemark.audit_member() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF coalesce(nullif(current_setting('tidemark.removed_members', true), ''), '[]')::jsonb ? OLD.member_id THEN
        INSERT INTO tidemark.audit_event (kind, group_name, claimed_by, reason, details)
        SELECT 'MEMBER REMOVED', name, nullif(current_setting('tidemark.claimed_by', true), ''),
               nullif(current_setting('tidemark.reason', true), ''),
               jsonb_strip_nulls(jsonb_build_object('member', OLD.member_id, 'instance', OLD.instance_id))
          FROM tidemark.consumer_group WHERE group_id = OLD.group_id;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER audit AFTER DELETE ON tidemark.group_member FOR EACH ROW EXECUTE FUNCTION tidemark.audit_member();

-- A run can claim to have added only columns that a table of its own role has, with their types.
CREATE FUNCTION tidemark.audit_columns() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    added jsonb := NEW.columns_added -> -1;
    known boolean := TG_OP = 'UPDATE';
BEGIN
    BEGIN
        known := known AND NEW.columns_added - -1 = coalesce(OLD.columns_added, '[]')
            AND (SELECT array_agg(key ORDER BY key) FROM jsonb_object_keys(added) key) = '{columns,table}'
            AND jsonb_typeof(added -> 'table') = 'string' AND jsonb_typeof(added -> 'columns') = 'array' AND added -> 'columns' <> '[]'
            AND NOT EXISTS (
                SELECT FROM jsonb_array_elements_text(added -> 'columns') named
                 WHERE NOT EXISTS (SELECT FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
                                     JOIN pg_attribute ON attrelid = pg_class.oid
                                    WHERE nspname || '.' || relname = added ->> 'table' AND pg_has_role(session_user, relowner, 'USAGE')
                                      AND NOT starts_with(nspname, 'pg_') AND attnum > 0 AND NOT attisdropped
                                      AND starts_with(named, attname || ' ') AND length(named) - length(attname) <= 100
                                      AND atttypid = to_regtype(substr(named, length(attname) + 2))));
    EXCEPTION WHEN syntax_error OR undefined_object OR invalid_parameter_value THEN
        known := false; -- not the name of a type
    END;
    IF known IS NOT TRUE THEN
        RAISE insufficient_privilege USING MESSAGE = 'permission denied for table attempt', DETAIL = 'These columns were not added.';
    END IF;
    INSERT INTO tidemark.audit_event (kind, group_name, dag_id, run_id, details)
    SELECT 'COLUMNS ADDED', name, NEW.dag_id, NEW.run_id, added || jsonb_build_object('attempt', NEW.attempt_id)
      FROM tidemark.consumer_group WHERE group_id = NEW.group_id;
    RETURN NULL;
END
$$;
CREATE TRIGGER audit AFTER UPDATE OF columns_added ON tidemark.attempt FOR EACH ROW EXECUTE FUNCTION tidemark.audit_columns();
CREATE TRIGGER audit_first AFTER INSERT ON tidemark.attempt FOR EACH ROW WHEN (NEW.columns_added IS NOT NULL)
    EXECUTE FUNCTION tidemark.audit_columns();

-- An event for the plan and for the application, with numbers and never with the condition.
CREATE FUNCTION tidemark.audit_erasure() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO tidemark.audit_event (kind, group_name, claimed_by, plan, reason, details)
    SELECT 'ERASURE ' || NEW.state, grp.name, coalesce(NEW.applied_by, NEW.planned_by), NEW.erasure_id, NEW.reason,
           jsonb_build_object('sink', NEW.sink, 'sink_rows', NEW.sink_rows, 'archived_rows', NEW.archived_rows,
                              'overwritten_rows', NEW.overwritten_rows, 'failed_records', NEW.failed_records, 'examples', NEW.examples)
      FROM tidemark.consumer_group grp WHERE grp.group_id = NEW.group_id;
    RETURN NULL;
END
$$;
CREATE TRIGGER audit AFTER INSERT OR UPDATE OF state ON tidemark.erasure FOR EACH ROW EXECUTE FUNCTION tidemark.audit_erasure();

CREATE FUNCTION tidemark.audit_maintenance() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO tidemark.audit_event (kind, claimed_by, dag_id, run_id, details)
    VALUES (CASE WHEN NEW.ended_at IS NULL THEN 'MAINTENANCE STARTED' ELSE 'MAINTENANCE DONE' END, NEW.done_by, NEW.dag_id, NEW.run_id,
            jsonb_build_object('maintenance', NEW.maintenance_id, 'keep', NEW.keep::text) ||
            CASE WHEN NEW.ended_at IS NULL THEN '{}'
                 ELSE jsonb_build_object('archives', NEW.archives, 'rows', NEW.rows, 'payloads', NEW.payloads) END);
    RETURN NULL;
END
$$;
CREATE TRIGGER audit AFTER INSERT OR UPDATE ON tidemark.maintenance FOR EACH ROW EXECUTE FUNCTION tidemark.audit_maintenance();

CREATE FUNCTION tidemark.audit_migration() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO tidemark.audit_event (kind, claimed_by, details)
    VALUES ('MIGRATED', nullif(current_setting('tidemark.claimed_by', true), ''), jsonb_build_object('migration', NEW.migration_id));
    RETURN NULL;
END
$$;
CREATE TRIGGER audit AFTER INSERT ON tidemark.migration FOR EACH ROW EXECUTE FUNCTION tidemark.audit_migration();

-- A trigger on a table of one's own could otherwise call them and write events that never happened.
REVOKE EXECUTE ON FUNCTION tidemark.audit_rewind(), tidemark.audit_redrive(), tidemark.audit_retry_action(), tidemark.audit_flow(),
    tidemark.audit_group(), tidemark.audit_member(), tidemark.audit_columns(), tidemark.audit_erasure(), tidemark.audit_maintenance(),
    tidemark.audit_migration() FROM PUBLIC;
