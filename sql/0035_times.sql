-- Every role that may write a row may also choose its times, and readers calculate with them. So a time that no clock shows, such as infinity,
-- is refused. Times of records are data of their producers, and stay as they are.

DO $$
DECLARE
    one record;
BEGIN
    FOR one IN
        SELECT attrelid::regclass AS relation, string_agg(quote_ident(attname), ', ') AS times
          FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
         WHERE relnamespace = 'tidemark'::regnamespace AND relkind = 'r' AND atttypid = 'timestamptz'::regtype AND NOT attisdropped
           AND attname NOT IN ('record_timestamp', 'next_at', 'base_next_at', 'mid_next_at', 'losing_from')
         GROUP BY attrelid
    LOOP
        EXECUTE format(
            'ALTER TABLE %s ADD CONSTRAINT times CHECK (least(%2$s) >= timestamptz ''1970-01-01Z'' AND greatest(%2$s) < timestamptz ''9999-01-01Z'') NOT VALID',
            one.relation, one.times);
    END LOOP;
END $$;
