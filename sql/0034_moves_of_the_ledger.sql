-- A rewind moves batches, failed records and lost ranges between the ledger and its archive. The two functions here do that as the owner:
-- no other role deletes from these tables or writes to the archive, so nothing can be lost or changed on the way.

CREATE FUNCTION tidemark.take_from_ledger(applied bigint) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tidemark.rewind WHERE rewind_id = applied AND state = 'PLANNED') THEN
        RAISE insufficient_privilege USING MESSAGE = 'permission denied for table batch',
            DETAIL = format('Rewind %s is not one that is being applied.', applied);
    END IF;
    -- Failed records in any state; pending retries are withdrawn. Stores their number per partition.
    WITH gone AS (
        DELETE FROM tidemark.failed_record USING tidemark.rewind_partition part
         WHERE part.rewind_id = applied AND NOT part.hold
           AND failed_record.group_id = part.group_id AND failed_record.topic_id = part.topic_id AND failed_record.partition = part.partition
           AND failed_record.record_offset >= part.superseded_from
        RETURNING failed_record.*
    ), kept AS (
        INSERT INTO tidemark.rewound_failed_record SELECT applied, gone.* FROM gone
    ), counted AS (
        SELECT group_id, topic_id, partition, count(*) AS records FROM gone GROUP BY group_id, topic_id, partition
    )
    UPDATE tidemark.rewind_partition part SET failed_records = coalesce(records, 0)
      FROM tidemark.rewind_partition mine LEFT JOIN counted USING (group_id, topic_id, partition)
     WHERE part.rewind_id = applied AND mine.rewind_id = part.rewind_id
       AND mine.group_id = part.group_id AND mine.topic_id = part.topic_id AND mine.partition = part.partition;
    -- Batches, including the one that the rewind cuts.
    WITH gone AS (
        DELETE FROM tidemark.batch USING tidemark.rewind_partition part
         WHERE part.rewind_id = applied AND NOT part.hold
           AND batch.group_id = part.group_id AND batch.topic_id = part.topic_id AND batch.partition = part.partition
           AND batch.end_offset > part.superseded_from
           AND batch.start_offset >= coalesce((SELECT max(start_offset) FROM tidemark.batch before
                                                WHERE before.group_id = part.group_id AND before.topic_id = part.topic_id
                                                  AND before.partition = part.partition AND before.start_offset <= part.superseded_from),
                                              part.superseded_from)
        RETURNING batch.*
    )
    INSERT INTO tidemark.rewound_batch SELECT applied, gone.* FROM gone;
    -- Lost ranges, including those of forward rewinds.
    WITH gone AS (
        DELETE FROM tidemark.lost_range USING tidemark.rewind_partition part
         WHERE part.rewind_id = applied AND NOT part.hold
           AND lost_range.group_id = part.group_id AND lost_range.topic_id = part.topic_id AND lost_range.partition = part.partition
           AND (lost_range.end_offset > part.superseded_from OR lost_range.end_offset IS NULL)
        RETURNING lost_range.*
    )
    INSERT INTO tidemark.rewound_lost_range SELECT applied, gone.* FROM gone;
END
$$;

CREATE FUNCTION tidemark.put_back_in_ledger(applied bigint) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    undone bigint := (SELECT undo_of FROM tidemark.rewind WHERE rewind_id = applied AND state = 'PLANNED');
BEGIN
    IF undone IS NULL THEN
        RAISE insufficient_privilege USING MESSAGE = 'permission denied for table batch',
            DETAIL = format('Rewind %s is not an undo that is being applied.', applied);
    END IF;
    -- The parts of cut batches and ranges, which come back whole.
    DELETE FROM tidemark.batch WHERE head_of IN (SELECT batch_id FROM tidemark.rewound_batch WHERE rewound_by = undone);
    DELETE FROM tidemark.lost_range WHERE head_of IN (SELECT lost_range_id FROM tidemark.rewound_lost_range WHERE rewound_by = undone);
    WITH back AS (
        DELETE FROM tidemark.rewound_batch WHERE rewound_by = undone RETURNING *
    )
    INSERT INTO tidemark.batch (batch_id, group_id, topic_id, partition, start_offset, end_offset, owner_epoch, attempt_id, loaded, skipped,
                                retried, failed, unaccounted, sink_rows, deleted, anchor_id, validation_id, committed_at, head_of, drained,
                                began_at) OVERRIDING SYSTEM VALUE
    SELECT batch_id, group_id, topic_id, partition, start_offset, end_offset, owner_epoch, attempt_id, loaded, skipped, retried,
           failed, unaccounted, sink_rows, deleted, anchor_id, validation_id, committed_at, head_of, drained, began_at FROM back;
    -- Where failed records were published no longer counts, because drains have passed that point: they are published again.
    WITH back AS (
        DELETE FROM tidemark.rewound_failed_record WHERE rewound_by = undone RETURNING *
    )
    INSERT INTO tidemark.failed_record (failed_record_id, group_id, topic_id, partition, record_offset, record_timestamp, key, value, headers,
                                        disposition, error_type, error_text, retry_number, attempt_id, created_at, state, due_at, hop_topic,
                                        publish_error, story, sink_rows, changed_at, ladder_at, redrives, action_id, tried_at, tried_late,
                                        emptied_at) OVERRIDING SYSTEM VALUE
    SELECT failed_record_id, group_id, topic_id, partition, record_offset, record_timestamp, key, value, headers,
           disposition, error_type, error_text, retry_number, attempt_id, created_at, state, due_at, hop_topic,
           publish_error, story, sink_rows, changed_at, ladder_at, redrives, action_id, tried_at, tried_late, emptied_at FROM back;
    WITH back AS (
        DELETE FROM tidemark.rewound_lost_range WHERE rewound_by = undone RETURNING *
    )
    INSERT INTO tidemark.lost_range (lost_range_id, group_id, topic_id, partition, start_offset, end_offset, reason, attempt_id, recorded_at,
                                     rewind_id, head_of) OVERRIDING SYSTEM VALUE
    SELECT lost_range_id, group_id, topic_id, partition, start_offset, end_offset, reason, attempt_id, recorded_at, rewind_id, head_of FROM back;
END
$$;
REVOKE EXECUTE ON FUNCTION tidemark.take_from_ledger(bigint), tidemark.put_back_in_ledger(bigint) FROM PUBLIC;

-- Roles with a profile get the rights of the profile again after the migrations. This is for roles that were granted theirs by hand.
DO $$
DECLARE
    held record;
BEGIN
    FOR held IN SELECT grantee::regrole::text AS role FROM pg_class, aclexplode(relacl)
                 WHERE oid = 'tidemark.rewound_batch'::regclass AND privilege_type = 'DELETE' AND grantee NOT IN (0, relowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION tidemark.take_from_ledger(bigint), tidemark.put_back_in_ledger(bigint) TO %s', held.role);
    END LOOP;
END $$;

DROP TRIGGER keep_batches ON tidemark.batch;
DROP TRIGGER keep_batches ON tidemark.rewound_batch;
DROP FUNCTION tidemark.keep_batches();
DROP TRIGGER keep_failed_records ON tidemark.failed_record;
DROP TRIGGER keep_failed_records ON tidemark.rewound_failed_record;
DROP FUNCTION tidemark.keep_failed_records();
DROP INDEX tidemark.rewound_failed_record_record;

-- A role that may not load adds a batch only as the part that a rewind leaves of another batch.
CREATE FUNCTION tidemark.keep_heads() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT tidemark.owns(TG_RELID) AND NOT EXISTS (
        SELECT FROM tidemark.rewound_batch whole
         WHERE whole.batch_id = NEW.head_of AND NEW.end_offset < whole.end_offset
           AND (whole.group_id, whole.topic_id, whole.partition, whole.start_offset, whole.owner_epoch, whole.attempt_id, whole.committed_at)
             = (NEW.group_id, NEW.topic_id, NEW.partition, NEW.start_offset, NEW.owner_epoch, NEW.attempt_id, NEW.committed_at)
           AND whole.validation_id IS NOT DISTINCT FROM NEW.validation_id) THEN
        RAISE insufficient_privilege USING MESSAGE = 'permission denied for table batch',
            DETAIL = 'This role may add only the part that a rewind leaves of a batch.';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER keep_heads BEFORE INSERT ON tidemark.batch FOR EACH ROW
    WHEN (NEW.head_of IS NOT NULL OR NOT has_column_privilege('tidemark.batch', 'anchor_id', 'UPDATE')) EXECUTE FUNCTION tidemark.keep_heads();

-- Who approved, rejected or applied a rewind, and when, is stored once. Times are the server's.
CREATE FUNCTION tidemark.keep_decisions() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text;
BEGIN
    IF tidemark.owns(TG_RELID) THEN
        RETURN NEW;
    END IF;
    FOREACH name IN ARRAY TG_ARGV LOOP
        IF to_jsonb(NEW) -> name IS DISTINCT FROM to_jsonb(OLD) -> name
           AND (to_jsonb(OLD) ->> name IS NOT NULL
                OR (name LIKE '%\_at' AND clock_timestamp() - (to_jsonb(NEW) ->> name)::timestamptz NOT BETWEEN '0' AND '1 minute')) THEN
            RAISE insufficient_privilege USING MESSAGE = format('permission denied for table %s', TG_TABLE_NAME),
                DETAIL = format('%s is set once, and a time only to the current time.', name);
        END IF;
    END LOOP;
    IF TG_TABLE_NAME = 'rewind' AND (OLD.state, NEW.state) NOT IN (('PLANNED', 'REJECTED'), ('PLANNED', 'APPLIED'), ('APPLIED', 'UNDONE'))
       AND OLD.state <> NEW.state THEN
        RAISE insufficient_privilege USING MESSAGE = 'permission denied for table rewind',
            DETAIL = format('Rewind %s is %s and does not become %s.', OLD.rewind_id, OLD.state, NEW.state);
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER keep_decisions BEFORE UPDATE ON tidemark.rewind FOR EACH ROW
    EXECUTE FUNCTION tidemark.keep_decisions('decided_by', 'decided_at', 'applied_by', 'applied_at', 'applied_no', 'dag_id', 'run_id');

CREATE FUNCTION tidemark.only_owner() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT tidemark.owns(TG_RELID) THEN
        RAISE insufficient_privilege USING MESSAGE = format('permission denied for table %s', TG_TABLE_NAME), DETAIL = TG_ARGV[0];
    END IF;
    RETURN NEW;
END
$$;
-- Each change of the state writes an event, which has the approver.
CREATE TRIGGER keep_decisions BEFORE UPDATE OF approved_by, started_at ON tidemark.redrive FOR EACH ROW
    WHEN (NEW.state = OLD.state AND (OLD.approved_by, OLD.started_at) IS DISTINCT FROM (NEW.approved_by, NEW.started_at))
    EXECUTE FUNCTION tidemark.only_owner('Who approved a redrive, and when it started, changes with its state.');
CREATE TRIGGER keep_name BEFORE UPDATE OF name ON tidemark.consumer_group FOR EACH ROW
    WHEN (NEW.name <> OLD.name AND NEW.name <> OLD.name || ' (deleted, group ' || OLD.group_id || ')')
    EXECUTE FUNCTION tidemark.only_owner('A group is renamed only when it is deleted.');

-- An undo puts these rows into the sink, so only who may change the sink adds one.
CREATE FUNCTION tidemark.keep_rows() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    other text := (SELECT sink FROM (SELECT DISTINCT sink FROM fresh) AS of_sinks
                    WHERE has_table_privilege(to_regclass(format('%I.%I', split_part(sink, '.', 1), substr(sink, strpos(sink, '.') + 1))),
                                              'INSERT, UPDATE, DELETE') IS NOT TRUE LIMIT 1);
BEGIN
    IF other IS NOT NULL AND NOT tidemark.owns(TG_RELID) THEN
        RAISE insufficient_privilege USING MESSAGE = 'permission denied for table rewound_row',
            DETAIL = format('This role may not change %s.', other);
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER keep_rows AFTER INSERT ON tidemark.rewound_row REFERENCING NEW TABLE AS fresh
    FOR EACH STATEMENT EXECUTE FUNCTION tidemark.keep_rows();

-- A run can claim to have added only columns that a table of its own role has, with their types.
CREATE OR REPLACE FUNCTION tidemark.audit_columns() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
CREATE TRIGGER audit_first AFTER INSERT ON tidemark.attempt FOR EACH ROW WHEN (NEW.columns_added IS NOT NULL)
    EXECUTE FUNCTION tidemark.audit_columns();
