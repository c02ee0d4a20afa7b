-- Statements about the views of validated rows. They lock nothing.

-- name: view
-- A view's definition; whether it has options or rights of single columns; whether this role may replace it; its owner, if another role.
SELECT pg_get_viewdef(oid) AS definition,
       reloptions IS NULL AND NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = view.oid AND attacl IS NOT NULL) AS plain,
       pg_has_role(relowner, 'USAGE') AND has_schema_privilege(relnamespace, 'CREATE') AS mine,
       nullif(pg_get_userbyid(relowner), current_user) AS other_owner, obj_description(oid, 'pg_class') AS comment
  FROM pg_class view WHERE oid = to_regclass(%(view)s) AND relkind = 'v';

-- name: grants
-- The rights that other roles have on a view, as statements.
SELECT format('GRANT %%s ON %%s TO %%s%%s;', string_agg(privilege_type, ', ' ORDER BY privilege_type), %(view)s,
              CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END,
              CASE WHEN is_grantable THEN ' WITH GRANT OPTION' ELSE '' END)
  FROM pg_class, aclexplode(relacl)
 WHERE oid = to_regclass(%(view)s) AND grantee <> relowner GROUP BY grantee, is_grantable ORDER BY grantee, is_grantable;
