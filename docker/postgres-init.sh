#!/usr/bin/env bash
# Run once by the Postgres image, when its volume is empty. Creates Airflow's database, Tidemark's database and Tidemark's two roles;
# `tidemark migrate` creates the schema and makes the grants.
set -euo pipefail
psql --no-psqlrc -v ON_ERROR_STOP=1 -v owner="${TIDEMARK_OWNER_PASSWORD:?}" -v run="${TIDEMARK_RUN_PASSWORD:?}" \
  -v airflow="${AIRFLOW_DB_PASSWORD:?}" --username "${POSTGRES_USER:-postgres}" --dbname postgres <<'SQL'
CREATE ROLE airflow LOGIN PASSWORD :'airflow';
CREATE DATABASE airflow OWNER airflow;
CREATE ROLE tidemark_owner LOGIN PASSWORD :'owner';
CREATE ROLE tidemark_run LOGIN PASSWORD :'run';
CREATE DATABASE tidemark OWNER tidemark_owner;
SQL
