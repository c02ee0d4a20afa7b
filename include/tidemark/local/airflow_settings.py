"""Settings of the local Airflow's processes: environment variables, connections, generated secrets.

All functions except `Secrets.of` are pure. Airflow is not imported: it only runs in its own processes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemark.local.folder import write_private

ADMIN = "admin"
MARK = "TIDEMARK_LOCAL_AIRFLOW"
"""The variable with ``<process>:<folder>``, which all descendants of the four inherit, so that they can be found and ended."""
PARALLELISM = 8

QUICK: Mapping[str, str] = {
    "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__PARALLELISM": str(PARALLELISM),  # the executor forks this many workers up front; default 32
    "AIRFLOW__API__WORKERS": "1",
    "AIRFLOW__API__INSTANCE_NAME": "Tidemark (local)",
    # Time from the end of a task to the next one: 1.1 s with the default of 1 s, 0.3 s with this, at the cost of a tenth of a core.
    "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.2",
    # New and changed DAG files and consumer specs appear after 10 s instead of minutes; one parser is enough for a handful of files.
    "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "10",
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "10",
    "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
    # Timeouts of deferred tasks and approvals are noticed after 3 s instead of 15 s.
    "AIRFLOW__SCHEDULER__TRIGGER_TIMEOUT_CHECK_INTERVAL": "3",
    # A task whose supervisor was killed is retried after one minute instead of five; orphans of a killed scheduler after 30 s.
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "60",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "30",
    # The triggers of a killed triggerer move to its successor after 15 s instead of 30 s (its heartbeat comes every 5 s).
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "15",
    # A running task notices "mark failed" at its next heartbeat.
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "2",
    # A task instance belongs to a host name. A laptop's name changes with its network; this one does not.
    "AIRFLOW__CORE__HOSTNAME_CALLABLE": "tidemark.local.airflow_settings.localhost",
    # The log servers would listen on all interfaces, so they are not started: the four processes see the same files. The api-server still
    # requests the log of a running task. Port 9 (discard) refuses it at once; the default port might belong to another Airflow.
    "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": "9",
    "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": "9",
}
"""Settings for a small, fast Airflow. ``env`` of `overlay` can override these, but not the identity settings there."""

_DROPPED_PREFIXES = ("AIRFLOW", "_AIRFLOW", "PYTEST_")
_DROPPED = {
    "VIRTUAL_ENV",
    "VIRTUAL_ENV_PROMPT",
    "PYTHONHOME",
    "__PYVENV_LAUNCHER__",
    "PYTHONDONTWRITEBYTECODE",  # without bytecode, every start compiles all of Airflow
}


def localhost() -> str:
    """The host name that every process of the local Airflow uses."""
    return "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """Secrets generated once per folder; the four processes share them across restarts."""

    admin_password: str
    jwt_secret: str
    api_secret_key: str
    fernet_key: str

    def __repr__(self) -> str:
        return "Secrets(…)"

    @classmethod
    def of(cls, folder: Path) -> Secrets:
        """The secrets of ``folder``, created on the first call. Only the owner can read the two files.

        ``passwords.json`` is the file Airflow's simple auth manager reads.
        """
        path = folder / "secrets.json"
        if not path.exists():
            generated = cls(
                admin_password=secrets.token_urlsafe(12),
                jwt_secret=secrets.token_hex(32),  # 64 characters: Airflow warns below the length of a SHA-512 key
                api_secret_key=secrets.token_hex(32),
                fernet_key=base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            )
            write_private(folder / "passwords.json", json.dumps({ADMIN: generated.admin_password}))
            write_private(path, json.dumps(asdict(generated)))
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def overlay(
    *, folder: Path, port: int, secrets: Secrets, metadata_url: str, env: Mapping[str, str], dags: Path, plugins: Path | None
) -> dict[str, str]:
    """The variables that make a process part of the Airflow in ``folder``.

    ``env`` overrides `QUICK`, but not the settings that identify this Airflow: folder, database, port, secrets.
    """
    url = f"http://127.0.0.1:{port}"
    return {
        **QUICK,
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{ADMIN}:admin",
        **env,
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(plugins or folder / "plugins"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": metadata_url,
        "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(folder / "logs"),
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",  # does not follow the port on its own
        "AIRFLOW__API__SECRET_KEY": secrets.api_secret_key,
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.jwt_secret,
        "AIRFLOW__CORE__FERNET_KEY": secrets.fernet_key,
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(folder / "passwords.json"),
        # Without this, setproctitle overwrites the environment in /proc, and with it the mark below.
        "SPT_NOENV": "1",
    }


def environment(base: Mapping[str, str], own: Mapping[str, str], *, process: str) -> dict[str, str]:
    """``base`` without variables of another Airflow or virtual environment, plus ``own`` and the mark of ``process``.

    ``PATH`` starts with the folder of the running Python, so that tasks find its commands. Loopback bypasses any proxy, because tasks talk
    to the api-server there.
    """
    inherited = {name: value for name, value in base.items() if not name.startswith(_DROPPED_PREFIXES) and name not in _DROPPED}
    commands = str(Path(sys.executable).parent)
    rest = [entry for entry in {**inherited, **own}.get("PATH", os.defpath).split(os.pathsep) if entry != commands]
    direct = ",".join(filter(None, [inherited.get("NO_PROXY") or inherited.get("no_proxy"), "127.0.0.1,localhost"]))
    forced = {
        "PATH": os.pathsep.join([commands, *rest]),
        "NO_PROXY": direct,
        "no_proxy": direct,
        "PGAPPNAME": session_name(process),  # not in the URL, because asyncpg reads it too and would reject it
    }
    return {**inherited, **own, **forced, MARK: mark(process, own["AIRFLOW_HOME"])}


def mark(process: str, folder: Path | str) -> str:
    return f"{process}:{folder}"


def session_name(process: str) -> str:
    """The ``application_name`` of the process's database sessions."""
    return f"airflow {process}"


def fingerprint(own: Mapping[str, str]) -> str:
    """A hash of the settings; the processes must restart if it differs from the stored one."""
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def command(*arguments: str) -> list[str]:
    """An ``airflow`` command line. ``-P`` keeps modules in the working directory from shadowing Airflow's."""
    return [sys.executable, "-P", "-m", "airflow", *arguments]


def connections_env(
    database_url: str, kafka_config: Mapping[str, object], spark_master: str, registry_url: str | None = None
) -> dict[str, str]:
    """The connections ``tidemark_postgres``, ``tidemark_kafka`` and ``tidemark_spark`` as environment variables that Airflow reads.

    ``kafka_config`` are librdkafka's own settings (``bootstrap.servers``, …); ``spark_master`` is ``local[2]`` or ``spark://host:port``.
    With a ``registry_url``, ``tidemark_registry`` too.
    """
    # The whole URL is the host, because Airflow's HTTP connections have no field for its path.
    registry = {"AIRFLOW_CONN_TIDEMARK_REGISTRY": json.dumps({"conn_type": "http", "host": registry_url})} if registry_url else {}
    return registry | {
        "AIRFLOW_CONN_TIDEMARK_POSTGRES": database_url,
        "AIRFLOW_CONN_TIDEMARK_KAFKA": json.dumps({"conn_type": "kafka", "extra": dict(kafka_config)}),
        "AIRFLOW_CONN_TIDEMARK_SPARK": json.dumps({"conn_type": "spark", "host": spark_master}),
    }
