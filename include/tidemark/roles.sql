-- Statements on the rights of roles in Tidemark's schemas. The granting session holds the advisory lock of migrations, so that two take turns.

-- name: missing
-- These privileges that the session's role lacks. Without columns: on all of the table's columns but the hidden ones. Locks nothing.
SELECT privilege || ' on tidemark.' || name
  FROM unnest(%(privileges)s::text[], %(tables)s::text[], %(columns)s::text[], %(hidden)s::text[]) WITH ORDINALITY
       AS wanted (privilege, name, columns, hidden, number)
 WHERE NOT has_table_privilege(format('tidemark.%%I', name)::regclass, privilege)
   AND ((columns = '' AND hidden = '')
        OR EXISTS (SELECT FROM pg_attribute
                    WHERE attrelid = format('tidemark.%%I', name)::regclass AND attnum > 0 AND NOT attisdropped
                      AND attname <> ALL (string_to_array(hidden, ' ')) AND (columns = '' OR attname = ANY (string_to_array(columns, ' ')))
                      AND NOT has_column_privilege(attrelid, attnum, privilege)))
 UNION ALL
SELECT 'USAGE on the sequence tidemark.' || name FROM unnest(%(sequences)s::text[]) name
 WHERE NOT has_sequence_privilege(format('tidemark.%%I', name)::regclass, 'USAGE')
 UNION ALL
SELECT 'EXECUTE on the function tidemark.' || proname FROM pg_proc
 WHERE pronamespace = 'tidemark'::regnamespace AND proname = ANY (%(functions)s::text[]) AND NOT has_function_privilege(oid, 'EXECUTE')
 UNION ALL
SELECT privilege || ' on the schema ' || name FROM unnest(%(schemas)s::text[]) name, unnest(ARRAY['USAGE', 'CREATE']) privilege
 WHERE (privilege = 'USAGE' OR name = %(creates_in)s::text) AND NOT has_schema_privilege(name, privilege);

-- name: owner
-- The schema's owner, and whether the session's role has its rights.
SELECT pg_get_userbyid(nspowner), pg_has_role(nspowner, 'USAGE'), current_user FROM pg_namespace WHERE nspname = 'tidemark';

-- name: role
-- Whether this role owns the schema. No row returned: there is no such role.
SELECT oid = (SELECT nspowner FROM pg_namespace WHERE nspname = 'tidemark') FROM pg_roles WHERE rolname = %(role)s;

-- name: record
-- Stores a role's profiles, and the event.
WITH gone AS (
    DELETE FROM tidemark.role_profile WHERE role = %(role)s AND profile <> ALL (%(profiles)s::text[])
), come AS (
    INSERT INTO tidemark.role_profile (role, profile) SELECT %(role)s, unnest(%(profiles)s::text[]) ON CONFLICT DO NOTHING
)
INSERT INTO tidemark.audit_event (kind, claimed_by, details)
SELECT 'ROLE GRANTED', nullif(current_setting('tidemark.claimed_by', true), ''),
       jsonb_build_object('role', %(role)s::text, 'profiles', %(profiles)s::text[],
                          'before', ARRAY(SELECT profile FROM tidemark.role_profile WHERE role = %(role)s ORDER BY profile));

-- name: forget
-- Deletes the profiles of dropped roles.
DELETE FROM tidemark.role_profile WHERE role NOT IN (SELECT rolname FROM pg_roles);

-- name: recorded
SELECT role, array_agg(profile) FROM tidemark.role_profile GROUP BY role ORDER BY role;

-- name: relations
-- The relations that the granting role owns in the schema, except those of the other role itself.
SELECT CASE relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, relname
  FROM pg_class WHERE relnamespace = 'tidemark'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'S')
   AND pg_has_role(relowner, 'USAGE') AND relowner <> (SELECT oid FROM pg_roles WHERE rolname = %(role)s)
 UNION ALL
SELECT 'FUNCTION', proname FROM pg_proc
 WHERE pronamespace = 'tidemark'::regnamespace AND pg_has_role(proowner, 'USAGE')
   AND EXISTS (SELECT FROM aclexplode(proacl) WHERE grantee = (SELECT oid FROM pg_roles WHERE rolname = %(role)s))
 ORDER BY 2;

-- name: columns
SELECT attname FROM pg_attribute
 WHERE attrelid = format('tidemark.%%I', %(table)s::text)::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum;
