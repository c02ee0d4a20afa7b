-- Schemas of their own for the tables that runs and rewinds create. Nobody but the owner creates in the schema tidemark from now on. Archives
-- from before stay where they are until an undo or `tidemark maintain`.

CREATE SCHEMA tidemark_staging;
CREATE SCHEMA tidemark_archive;

-- Roles with a profile get the rights of the profile again after the migrations. These are for roles that were granted theirs by hand.
DO $$
DECLARE
    held record;
BEGIN
    FOR held IN SELECT privilege_type, CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END AS role
                  FROM pg_namespace, aclexplode(nspacl)
                 WHERE nspname = 'tidemark' AND grantee <> nspowner
    LOOP
        IF held.role <> 'PUBLIC' THEN
            EXECUTE format('GRANT %s ON SCHEMA tidemark_staging, tidemark_archive TO %s', held.privilege_type, held.role);
        END IF;
        IF held.privilege_type = 'CREATE' THEN
            EXECUTE format('REVOKE CREATE ON SCHEMA tidemark FROM %s', held.role);
        END IF;
    END LOOP;
END $$;
