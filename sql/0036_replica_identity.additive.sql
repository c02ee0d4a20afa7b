-- A publication FOR ALL TABLES has these tables too. Without a primary key, they need another replica identity, or Postgres refuses to change
-- and delete their rows.
ALTER TABLE tidemark.flow REPLICA IDENTITY FULL;
ALTER TABLE tidemark.validation_row REPLICA IDENTITY FULL;
