#!/usr/bin/env bash
# Airflow's tables, and the one user of its simple auth manager.
set -euo pipefail
airflow db migrate
umask 077
python -c 'import json, os; print(json.dumps({"admin": os.environ["AIRFLOW_ADMIN_PASSWORD"]}))' \
  > "${AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE:?}"
