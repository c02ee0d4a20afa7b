#!/usr/bin/env bash
# Formats Kafka's data folder if needed, then starts the broker.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
settings="${KAFKA_SETTINGS:-$here/kafka.properties}"
jars="$(python -c 'from tidemark.jvm.jars import broker_jars; print(broker_jars()[0].parent)')"
logging="-Dlog4j2.configurationFile=$(python -c 'from importlib import resources; print(resources.files("tidemark.local") / "log4j2.properties")')"
java "$logging" -cp "$jars/*" kafka.tools.StorageTool format --ignore-formatted -t "${KAFKA_CLUSTER_ID:?set it, see .env.example}" -c "$settings"
exec java -Xmx512m "$logging" -cp "$jars/*" kafka.Kafka "$settings"
