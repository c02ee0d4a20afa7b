-- Roles: which profiles a role has, the events of the audit log, and an append-only ledger.

-- In the order in which commits lock them: this migration and a commit cannot wait for each other.
LOCK TABLE tidemark.consumer_group, tidemark.partition_offset, tidemark.batch IN SHARE ROW EXCLUSIVE MODE;

-- What `tidemark migrate --grant-to` has granted; each migration grants it again, for the tables that have come since.
CREATE TABLE tidemark.role_profile (
    role       text        NOT NULL,
    profile    text        NOT NULL CHECK (profile IN ('reader', 'runner', 'stager', 'operator', 'rewinder')),
    granted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (role, profile)
);

-- One row an action. Only the triggers below and the owner write it, in the action's transaction.
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

-- Default privileges of the schema may have given roles more than SELECT. A role that could write role_profile would get any profile from
-- the owner's next migration.
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

-- Refuses the statement to all but the table's owner.
CREATE FUNCTION tidemark.append_only() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT pg_has_role((SELECT relowner FROM pg_class WHERE oid = TG_RELID), 'USAGE') THEN
        RAISE insufficient_privilege USING MESSAGE = format('permission denied for table %s', TG_TABLE_NAME),
            DETAIL = format('tidemark.%s is append-only: only its owner may %s.', TG_TABLE_NAME, TG_OP);
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON tidemark.audit_event
    FOR EACH STATEMENT EXECUTE FUNCTION tidemark.append_only();
-- What changes in the ledger is which validation has judged a batch, and on which batch its rows are anchored.
CREATE TRIGGER append_only BEFORE TRUNCATE OR UPDATE OF batch_id, group_id, topic_id, partition, start_offset, end_offset, owner_epoch,
        attempt_id, loaded, skipped, retried, failed, unaccounted, sink_rows, committed_at, head_of, drained ON tidemark.batch
    FOR EACH STATEMENT EXECUTE FUNCTION tidemark.append_only();
CREATE TRIGGER append_only BEFORE UPDATE OR TRUNCATE ON tidemark.rewound_batch
    FOR EACH STATEMENT EXECUTE FUNCTION tidemark.append_only();

-- A batch that leaves the ledger is in a rewind's archive with the same numbers, or is the head that a rewind made of one that is. A batch
-- that leaves the archive is in the ledger again.
CREATE FUNCTION tidemark.keep_batches() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    lost bigint;
BEGIN
    IF TG_TABLE_NAME = 'batch' THEN
        SELECT batch_id INTO lost FROM gone
         WHERE NOT EXISTS (SELECT FROM tidemark.rewound_batch kept
                            WHERE kept.batch_id = gone.batch_id
                              AND (kept.group_id, kept.topic_id, kept.partition, kept.start_offset, kept.end_offset, kept.loaded, kept.skipped,
                                   kept.retried, kept.failed, kept.unaccounted, kept.sink_rows)
                                = (gone.group_id, gone.topic_id, gone.partition, gone.start_offset, gone.end_offset, gone.loaded, gone.skipped,
                                   gone.retried, gone.failed, gone.unaccounted, gone.sink_rows))
           AND NOT EXISTS (SELECT FROM tidemark.rewound_batch kept WHERE kept.batch_id = gone.head_of) LIMIT 1;
    ELSE
        SELECT batch_id INTO lost FROM gone
         WHERE NOT EXISTS (SELECT FROM tidemark.batch kept
                            WHERE kept.batch_id = gone.batch_id
                              AND (kept.group_id, kept.topic_id, kept.partition, kept.start_offset, kept.end_offset, kept.loaded, kept.skipped,
                                   kept.retried, kept.failed, kept.unaccounted, kept.sink_rows)
                                = (gone.group_id, gone.topic_id, gone.partition, gone.start_offset, gone.end_offset, gone.loaded, gone.skipped,
                                   gone.retried, gone.failed, gone.unaccounted, gone.sink_rows)) LIMIT 1;
    END IF;
    IF lost IS NOT NULL AND NOT pg_has_role((SELECT relowner FROM pg_class WHERE oid = TG_RELID), 'USAGE') THEN
        RAISE insufficient_privilege USING MESSAGE = format('permission denied for table %s', TG_TABLE_NAME),
            DETAIL = format('Batch %s would be neither in the ledger nor in the archive of a rewind.', lost);
    END IF;
    RETURN NULL;
END
$$;
CREATE INDEX rewound_batch_batch ON tidemark.rewound_batch (batch_id);
CREATE TRIGGER keep_batches AFTER DELETE ON tidemark.batch REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION tidemark.keep_batches();
CREATE TRIGGER keep_batches AFTER DELETE ON tidemark.rewound_batch REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION tidemark.keep_batches();

-- The triggers that write the events run as the owner: no other role has INSERT there. `tidemark.claimed_by` and `tidemark.reason` are
-- settings of the transaction, for actions whose rows do not name them.

CREATE FUNCTION tidemark.audit_rewind() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_TABLE_NAME = 'rewind_group' THEN
        INSERT INTO tidemark.audit_event (kind, group_name, claimed_by, dag_id, run_id, plan, digest, reason, details)
        SELECT 'REWIND ' || state, NEW.group_name, planned_by, dag_id, run_id, rewind_id, digest, reason,
               jsonb_strip_nulls(jsonb_build_object('scenario', scenario, 'undo_of', undo_of, 'sink', NEW.sink))
          FROM tidemark.rewind WHERE rewind_id = NEW.rewind_id;
    ELSE
        INSERT INTO tidemark.audit_event (kind, group_name, claimed_by, dag_id, run_id, plan, digest, reason, details)
        SELECT 'REWIND ' || NEW.state, grp.group_name, CASE WHEN NEW.state = 'REJECTED' THEN NEW.decided_by ELSE NEW.applied_by END,
               NEW.dag_id, NEW.run_id, NEW.rewind_id, NEW.digest, NEW.reason,
               jsonb_strip_nulls(jsonb_build_object('approved_by', CASE WHEN NEW.state = 'APPLIED' THEN NEW.decided_by END,
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
    INSERT INTO tidemark.audit_event (kind, group_name, claimed_by, dag_id, run_id, plan, reason, details)
    SELECT 'REDRIVE ' || CASE NEW.state WHEN 'RUNNING' THEN 'STARTED' ELSE NEW.state END, grp.name,
           CASE WHEN TG_OP = 'INSERT' THEN NEW.planned_by ELSE nullif(current_setting('tidemark.claimed_by', true), '') END,
           NEW.dag_id, NEW.run_id, NEW.redrive_id, coalesce(nullif(current_setting('tidemark.reason', true), ''), NEW.reason),
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
    tidemark.audit_group(), tidemark.audit_maintenance(), tidemark.audit_migration() FROM PUBLIC;
