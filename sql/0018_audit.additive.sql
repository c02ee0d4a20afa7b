-- The audit log: removals of members, and a digest of a redrive's plan.

-- Of the settings and the records of a redrive, as stored. `records` is in ascending order.
CREATE FUNCTION tidemark.redrive_digest(consumer text, destination text, filter jsonb, per_second integer, max_redrives integer, records bigint[])
RETURNS text LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT encode(sha256(convert_to(jsonb_build_array(consumer, destination, filter, per_second, max_redrives)::text
                                    || array_to_string(records, ','), 'UTF8')), 'hex')
$$;

ALTER TABLE tidemark.redrive ADD COLUMN digest text; -- null: planned before 0018

-- As in 0015, and with the digest.
CREATE OR REPLACE FUNCTION tidemark.audit_redrive() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
REVOKE EXECUTE ON FUNCTION tidemark.audit_member() FROM PUBLIC;
