-- Every role that may write a row may also choose its times, and readers calculate with them. So a time that no clock shows, such as infinity,
-- and a length of time that Python cannot represent are refused. Times of records are data of their producers, and stay as they are.

DO $$
DECLARE
    one record;
BEGIN
    FOR one IN
        SELECT attrelid::regclass AS relation, name, type, first, beyond, string_agg(quote_ident(attname), ', ' ORDER BY attnum) AS columns
          FROM (VALUES ('times', 'timestamptz', '1970-01-01Z', '9999-01-01Z'), ('lengths', 'interval', '0', '999999999 days'))
               AS kind (name, type, first, beyond)
          JOIN pg_attribute ON atttypid = type::regtype AND NOT attisdropped
               AND attname NOT IN ('record_timestamp', 'next_at', 'base_next_at', 'mid_next_at', 'losing_from')
          JOIN pg_class ON pg_class.oid = attrelid AND relnamespace = 'tidemark'::regnamespace AND relkind = 'r'
         GROUP BY attrelid, name, type, first, beyond
    LOOP
        EXECUTE format('ALTER TABLE %s ADD CONSTRAINT %I CHECK (least(%3$s) >= %4$s %5$L AND greatest(%3$s) < %4$s %6$L)',
                       one.relation, one.name, one.columns, one.type, one.first, one.beyond);
    END LOOP;
END $$;
