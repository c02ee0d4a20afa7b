#!/usr/bin/env bash
# Creates Airflow's tables and the single user of its simple auth manager.
set -euo pipefail
airflow db migrate
umask 077
python -c 'import json, os; print(json.dumps({"admin": os.environ["AIRFLOW_ADMIN_PASSWORD"]}))' \
  > "${AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE:?}"
