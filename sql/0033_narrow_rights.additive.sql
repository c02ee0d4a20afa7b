-- What a profile may do to these tables beyond what its grants can say. The owner may do everything.

CREATE FUNCTION tidemark.owns(relation oid) RETURNS boolean LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT pg_has_role((SELECT relowner FROM pg_class WHERE oid = relation), 'USAGE')
$$;

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

-- As `keep_batches` does for the ledger: a failed record moves between these tables and is never lost.
CREATE FUNCTION tidemark.keep_failed_records() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    lost bigint;
BEGIN
    IF TG_TABLE_NAME = 'failed_record' THEN
        SELECT failed_record_id INTO lost FROM gone
         WHERE NOT EXISTS (SELECT FROM tidemark.rewound_failed_record kept
                            WHERE kept.failed_record_id = gone.failed_record_id
                              AND (kept.group_id, kept.topic_id, kept.partition, kept.record_offset, kept.state)
                                = (gone.group_id, gone.topic_id, gone.partition, gone.record_offset, gone.state)
                              AND (kept.key, kept.value) IS NOT DISTINCT FROM (gone.key, gone.value)) LIMIT 1;
    ELSE
        SELECT failed_record_id INTO lost FROM gone
         WHERE NOT EXISTS (SELECT FROM tidemark.failed_record kept
                            WHERE kept.failed_record_id = gone.failed_record_id
                              AND (kept.group_id, kept.topic_id, kept.partition, kept.record_offset, kept.state)
                                = (gone.group_id, gone.topic_id, gone.partition, gone.record_offset, gone.state)
                              AND (kept.key, kept.value) IS NOT DISTINCT FROM (gone.key, gone.value)) LIMIT 1;
    END IF;
    IF lost IS NOT NULL AND NOT tidemark.owns(TG_RELID) THEN
        RAISE insufficient_privilege USING MESSAGE = format('permission denied for table %s', TG_TABLE_NAME),
            DETAIL = format('Failed record %s would be neither in the ledger nor in the archive of a rewind.', lost);
    END IF;
    RETURN NULL;
END
$$;
CREATE INDEX rewound_failed_record_record ON tidemark.rewound_failed_record (failed_record_id);
CREATE TRIGGER keep_failed_records AFTER DELETE ON tidemark.failed_record REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION tidemark.keep_failed_records();
CREATE TRIGGER keep_failed_records AFTER DELETE ON tidemark.rewound_failed_record REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION tidemark.keep_failed_records();

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

-- A run can claim to have added only columns that a table of its own role has.
CREATE OR REPLACE FUNCTION tidemark.audit_columns() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    added jsonb := NEW.columns_added -> -1;
BEGIN
    IF NEW.columns_added - -1 <> coalesce(OLD.columns_added, '[]') OR (SELECT array_agg(key ORDER BY key) FROM jsonb_object_keys(added) key) <> '{columns,table}'
       OR EXISTS (SELECT FROM jsonb_array_elements_text(added -> 'columns') said
                   WHERE NOT EXISTS (SELECT FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
                                       JOIN pg_attribute ON attrelid = pg_class.oid
                                      WHERE nspname || '.' || relname = added ->> 'table' AND pg_has_role(session_user, relowner, 'USAGE')
                                        AND attnum > 0 AND NOT attisdropped AND starts_with(said, attname || ' ')
                                        AND length(said) - length(attname) <= 100)) THEN
        RAISE insufficient_privilege USING MESSAGE = 'permission denied for table attempt', DETAIL = 'These columns were not added.';
    END IF;
    INSERT INTO tidemark.audit_event (kind, group_name, dag_id, run_id, details)
    SELECT 'COLUMNS ADDED', name, NEW.dag_id, NEW.run_id, added || jsonb_build_object('attempt', NEW.attempt_id)
      FROM tidemark.consumer_group WHERE group_id = NEW.group_id;
    RETURN NULL;
END
$$;
