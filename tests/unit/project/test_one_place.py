"""Every client of Kafka and every session of Postgres is made in one place, which adds what logs it in."""

from __future__ import annotations

import ast

import pytest

from tidemark import project

ROOT = project.root()
FOLDERS = ("include/tidemark", "spark_jobs", "dags", "plugins")
CLIENTS = {
    "AdminClient", "Consumer", "Producer", "DeserializingConsumer", "SerializingProducer", "ShareConsumer", "AIOConsumer", "AIOProducer",
}  # fmt: skip
"""Classes of confluent-kafka that connect."""
OTHERS = {"kafka", "aiokafka", "psycopg", "asyncpg", "pg8000"}
"""Other libraries that connect. Nothing imports them."""
SESSIONS = {"connect", "create_engine", "create_async_engine", "ThreadedConnectionPool", "SimpleConnectionPool", "PostgresHook"}
MAY_CONNECT = {
    "include/tidemark/db.py: psycopg2.connect in _connected": "asks for the password",
    "include/tidemark/local/postgres.py: psycopg2.connect in _session": "the embedded server's own password, on loopback",
    "include/tidemark/local/kafka.py: AdminClient in _answers": "the embedded broker, which has no logins",
    "include/tidemark/kafka/compiled.py: rd_kafka_new in _connect": "sets the callback in C",
}
"""What connects outside of `tidemark.kafka.config.connected`, and why it may."""


def connecting(tree: ast.Module) -> list[str]:
    """The calls that connect, each with its function."""
    clients, found = set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "confluent_kafka":
            clients |= {name.asname or name.name for name in node.names if name.name in CLIENTS}
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            found += [f"import {name}" for name in modules if name.partition(".")[0] in OTHERS and not getattr(node, "level", 0)]
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            given = {one.id for one in call.args if isinstance(one, ast.Name)}
            if (
                (called.partition(".")[0] in {"psycopg2", "sqlalchemy"} and called.rpartition(".")[2] in SESSIONS)
                or called in clients | SESSIONS - {"connect"}
                or ("." in called and called.rpartition(".")[2] in CLIENTS)
            ):
                found.append(f"{called} in {function.name}")
            elif given & clients and called not in {"connected", "isinstance"}:
                found.append(f"{called}({', '.join(sorted(given & clients))}) in {function.name}")
            elif called.endswith("kafka['new']"):
                found.append(f"rd_kafka_new in {function.name}")
    return found


def test_nothing_else_connects() -> None:
    """A client made elsewhere would have no token, and fail where identities have no passwords."""
    found = set()
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        name = path.relative_to(ROOT)
        found |= {f"{name}: {one}" for one in connecting(ast.parse(path.read_text(encoding="utf-8")))}
    assert found == set(MAY_CONNECT)


@pytest.mark.parametrize(
    "code",
    [
        "from confluent_kafka import Consumer\ndef f(): return Consumer({})",
        "from confluent_kafka import Producer as Make\ndef f(): return Make({})",
        "import confluent_kafka\ndef f(): return confluent_kafka.admin.AdminClient({})",
        "from confluent_kafka import Consumer\ndef f(): return made(Consumer, {})",
        "import psycopg2\ndef f(): return psycopg2.connect('x')",
        "from sqlalchemy import create_engine\ndef f(): return create_engine('x')",
        "import psycopg",
    ],
)
def test_another_place_would_be_found(code: str) -> None:
    """Checks that the test above can fail."""
    assert len(connecting(ast.parse(code))) == 1
