"""The files for Kubernetes and the settings that the documentation shows with them agree. They have not been applied to a cluster."""

from __future__ import annotations

import json
from typing import Any

import yaml
from tests.support.documented import snippets

from tidemark import project
from tidemark.connections import BOOTSTRAP_SERVERS, FILES

FOLDER = project.shipped("docker") / "kubernetes"


def rights() -> dict[str, Any]:
    """The objects of ``rights.yaml`` by kind."""
    return {found["kind"]: found for found in yaml.safe_load_all((FOLDER / "rights.yaml").read_text())}


def documented_conf() -> dict[str, str]:
    (extra,) = (value for code in snippets("docs/deployment/index.md", "json") if "deploy-mode" in (value := json.loads(code)))
    conf: dict[str, str] = extra["conf"]
    return conf


def test_account_of_drivers_has_the_rights_that_spark_needs_in_its_namespace() -> None:
    found = rights()
    account, role, binding = found["ServiceAccount"]["metadata"], found["Role"], found["RoleBinding"]
    assert {**account, "kind": "ServiceAccount"} in binding["subjects"]
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]}
    assert binding["metadata"]["namespace"] == role["metadata"]["namespace"] == account["namespace"]
    (rule,) = role["rules"]
    assert {"pods", "services", "configmaps"} <= set(rule["resources"])
    assert {"create", "get", "watch", "delete"} <= set(rule["verbs"])


def test_documented_settings_name_that_account_and_give_the_pod_its_connections() -> None:
    conf, account = documented_conf(), rights()["ServiceAccount"]["metadata"]
    assert conf["spark.kubernetes.namespace"] == account["namespace"]
    assert conf["spark.kubernetes.authenticate.driver.serviceAccountName"] == account["name"]
    given = {key.removeprefix("spark.kubernetes.driverEnv."): value for key, value in conf.items() if ".driverEnv." in key}
    assert set(given) == {BOOTSTRAP_SERVERS, FILES["TIDEMARK_DATABASE_URL"], FILES["TIDEMARK_KAFKA_CONFIG"]}
    mounted = conf["spark.kubernetes.driver.secrets.tidemark"]
    assert all(value.startswith(f"{mounted}/") for name, value in given.items() if name.endswith("_FILE"))
