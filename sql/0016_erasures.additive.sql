-- Erasures: a person's rows, removed from a sink and from what is kept of them. Neither the condition nor any of their data is stored.

CREATE TABLE tidemark.erasure (
    erasure_id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id         integer     NOT NULL REFERENCES tidemark.consumer_group,
    consumer         text        NOT NULL,
    sink             text        NOT NULL,
    state            text        NOT NULL DEFAULT 'PLANNED' CHECK (state IN ('PLANNED', 'APPLIED')),
    salt             bytea       NOT NULL,
    digest           bytea       NOT NULL, -- scrypt of the condition: apply must be given the same one
    sink_rows        bigint      NOT NULL CHECK (sink_rows >= 0), -- as planned, then as removed
    archived_rows    bigint      NOT NULL CHECK (archived_rows >= 0),
    overwritten_rows bigint      NOT NULL CHECK (overwritten_rows >= 0),
    failed_records   bigint      NOT NULL CHECK (failed_records >= 0),
    examples         bigint      NOT NULL CHECK (examples >= 0),
    reason           text        NOT NULL CHECK (length(btrim(reason)) >= 10),
    planned_by       text        NOT NULL CHECK (planned_by <> ''),
    planned_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    applied_by       text CHECK (applied_by <> ''),
    applied_at       timestamptz,
    CHECK ((state = 'APPLIED') = (applied_at IS NOT NULL)),
    CHECK ((applied_at IS NULL) = (applied_by IS NULL))
);
CREATE INDEX erasure_group ON tidemark.erasure (group_id, erasure_id);

-- What the ledger counts and the sink lacks since: rows of a record of a batch. No reference to the batch: a rewind takes it out, and its
-- undo puts it back.
CREATE TABLE tidemark.erased (
    erasure_id    bigint  NOT NULL REFERENCES tidemark.erasure,
    batch_id      bigint  NOT NULL,
    record_offset bigint  NOT NULL,
    rows          bigint  NOT NULL CHECK (rows > 0),
    whole         boolean NOT NULL, -- the record has no row left
    PRIMARY KEY (batch_id, record_offset, erasure_id)
);

-- An archive may lose all of its rows to erasures. It stays, so that its rewind can be undone.
ALTER TABLE tidemark.rewind_archive
    DROP CONSTRAINT rewind_archive_rows_check,
    ADD CONSTRAINT rewind_archive_rows_check CHECK (rows >= 0);

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
REVOKE EXECUTE ON FUNCTION tidemark.audit_erasure() FROM PUBLIC;
