#!/usr/bin/env bash
# Starts Spark's master or worker. The cluster's secret goes into a file, because every user of the host can see the arguments of a JVM.
#   spark.sh org.apache.spark.deploy.master.Master --host ...
set -euo pipefail
settings="$(mktemp)" # readable for this user only
cat >"$settings" <<END
spark.authenticate true
spark.authenticate.secret ${SPARK_AUTH_SECRET:?set it, see .env.example}
spark.network.crypto.enabled true
END
unset SPARK_AUTH_SECRET
exec spark-class "$1" --properties-file "$settings" "${@:2}"
