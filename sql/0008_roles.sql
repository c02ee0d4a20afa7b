-- Roles: which profiles a role has, and what a profile may do to tables beyond what its grants can say. The owner may do everything.

-- The tables that runs and rewinds create are in schemas of their own. Nobody but the owner creates in the schema tidemark.
CREATE SCHEMA tidemark_staging;
CREATE SCHEMA tidemark_archive;

-- Default privileges, or a grant by hand, may have given others CREATE there.
DO $$
DECLARE
    held record;
BEGIN
    FOR held IN SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END AS role FROM pg_namespace, aclexplode(nspacl)
                 WHERE nspname = 'tidemark' AND grantee <> nspowner AND privilege_type = 'CREATE' LOOP
        EXECUTE format('REVOKE CREATE ON SCHEMA tidemark FROM %s', held.role);
    END LOOP;
END
$$;

-- What `tidemark migrate --grant-to` has granted; each migration grants it again, for the tables that have come since.
CREATE TABLE tidemark.role_profile (
    role       text        NOT NULL,
    profile    text        NOT NULL CHECK (profile IN ('reader', 'runner', 'stager', 'operator', 'rewinder')),
    granted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (role, profile)
);

-- Whether the current role owns a table.
CREATE FUNCTION tidemark.owns(relation oid) RETURNS boolean LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT pg_has_role((SELECT relowner FROM pg_class WHERE oid = relation), 'USAGE')
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
-- What changes in the ledger is which validation has judged a batch, and on which batch its rows are anchored.
CREATE TRIGGER append_only BEFORE TRUNCATE OR UPDATE OF batch_id, group_id, topic_id, partition, start_offset, end_offset, owner_epoch,
        attempt_id, loaded, skipped, retried, failed, unaccounted, sink_rows, committed_at, head_of, drained, deleted ON tidemark.batch
    FOR EACH STATEMENT EXECUTE FUNCTION tidemark.append_only();
CREATE TRIGGER append_only BEFORE UPDATE OR TRUNCATE ON tidemark.rewound_batch
    FOR EACH STATEMENT EXECUTE FUNCTION tidemark.append_only();

-- Refuses the change to all but the table's owner, with the reason that is the trigger's argument.
CREATE FUNCTION tidemark.only_owner() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT tidemark.owns(TG_RELID) THEN
        RAISE insufficient_privilege USING MESSAGE = format('permission denied for table %s', TG_TABLE_NAME), DETAIL = TG_ARGV[0];
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER keep_name BEFORE UPDATE OF name ON tidemark.consumer_group FOR EACH ROW
    WHEN (NEW.name <> OLD.name AND NEW.name <> OLD.name || ' (deleted, group ' || OLD.group_id || ')')
    EXECUTE FUNCTION tidemark.only_owner('A group is renamed only when it is deleted.');
CREATE TRIGGER keep_side BEFORE UPDATE OF side_id ON tidemark.rewind_group FOR EACH ROW
    WHEN (OLD.side_id IS NOT NULL AND NEW.side_id IS DISTINCT FROM OLD.side_id)
    EXECUTE FUNCTION tidemark.only_owner('The side group of a replay beside is stored once.');
-- Each change of the state writes an event, which has the approver.
CREATE TRIGGER keep_decisions BEFORE UPDATE OF approved_by, started_at ON tidemark.redrive FOR EACH ROW
    WHEN (NEW.state = OLD.state AND (OLD.approved_by, OLD.started_at) IS DISTINCT FROM (NEW.approved_by, NEW.started_at))
    EXECUTE FUNCTION tidemark.only_owner('Who approved a redrive, and when it started, changes with its state.');

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
    WHEN (NEW.head_of IS NOT NULL OR NOT has_column_privilege('tidemark.batch', 'whole_batch_id', 'UPDATE')) EXECUTE FUNCTION tidemark.keep_heads();

-- Payloads are edited by operators, who may count redrives; anybody else can only empty them.
CREATE FUNCTION tidemark.keep_payload() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT (NEW.key IS NULL AND NEW.value IS NULL AND NEW.headers::text = '[]') AND NOT tidemark.owns(TG_RELID)
       AND NOT (TG_TABLE_NAME = 'failed_record' AND has_column_privilege(TG_RELID, 'redrives', 'UPDATE')) THEN
        RAISE insufficient_privilege USING MESSAGE = format('permission denied for table %s', TG_TABLE_NAME),
            DETAIL = 'This role may remove the payload of a record, not change it.';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER keep_payload BEFORE UPDATE OF key, value, headers ON tidemark.failed_record
    FOR EACH ROW EXECUTE FUNCTION tidemark.keep_payload();
CREATE TRIGGER keep_payload BEFORE UPDATE OF key, value, headers ON tidemark.failed_record_edit
    FOR EACH ROW EXECUTE FUNCTION tidemark.keep_payload();
CREATE TRIGGER keep_payload BEFORE UPDATE OF key, value, headers ON tidemark.rewound_failed_record
    FOR EACH ROW EXECUTE FUNCTION tidemark.keep_payload();

-- An erasure removes the examples of a verdict, and changes nothing else of it.
CREATE FUNCTION tidemark.keep_verdict() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.detail IS DISTINCT FROM OLD.detail #- '{observed,examples}' AND NOT tidemark.owns(TG_RELID) THEN
        RAISE insufficient_privilege USING MESSAGE = format('permission denied for table %s', TG_TABLE_NAME),
            DETAIL = 'This role may remove the examples of a result, not change it.';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER keep_verdict BEFORE UPDATE OF detail ON tidemark.validation_result
    FOR EACH ROW EXECUTE FUNCTION tidemark.keep_verdict();

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
    IF TG_TABLE_NAME = 'rewind' AND (OLD.state, NEW.state) NOT IN (('PLANNED', 'REJECTED'), ('PLANNED', 'APPLIED'), ('APPLIED', 'UNDONE'), ('PLANNED', 'BESIDE'),
                                                                   ('BESIDE', 'APPLIED'), ('BESIDE', 'DISCARDED'))
       AND OLD.state <> NEW.state THEN
        RAISE insufficient_privilege USING MESSAGE = 'permission denied for table rewind',
            DETAIL = format('Rewind %s is %s and does not become %s.', OLD.rewind_id, OLD.state, NEW.state);
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER keep_decisions BEFORE UPDATE ON tidemark.rewind FOR EACH ROW
    EXECUTE FUNCTION tidemark.keep_decisions('decided_by', 'decided_at', 'started_by', 'started_at', 'applied_by', 'applied_at', 'applied_no',
                                             'dag_id', 'run_id');
-- Whether the current role may change the rows of a sink (schema.table).
CREATE FUNCTION tidemark.changes(sink text) RETURNS boolean LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT has_table_privilege(to_regclass(format('%I.%I', split_part(sink, '.', 1), substr(sink, strpos(sink, '.') + 1))),
                               'INSERT, UPDATE, DELETE') IS TRUE
$$;

-- An undo puts these rows into the sink, so only who may change the sink adds one.
CREATE FUNCTION tidemark.keep_rows() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    other text := (SELECT sink FROM (SELECT DISTINCT sink FROM fresh) AS of_sinks WHERE NOT tidemark.changes(sink) LIMIT 1);
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

-- The swap of a replay beside makes the deletions of its shadow deletions of the sink, so only who may change the sink does that.
CREATE FUNCTION tidemark.keep_sink() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT tidemark.changes(NEW.sink) AND NOT tidemark.owns(TG_RELID) THEN
        RAISE insufficient_privilege USING MESSAGE = 'permission denied for table deletion',
            DETAIL = format('This role may not change %s.', NEW.sink);
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER keep_sink BEFORE UPDATE OF sink ON tidemark.deletion FOR EACH ROW
    WHEN (NEW.sink <> OLD.sink) EXECUTE FUNCTION tidemark.keep_sink();
