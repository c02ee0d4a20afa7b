"""The names of clusters and databases in lineage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemark.airflow.lineage.facets import Consumed, kafka_address, postgres_address


@pytest.mark.parametrize(
    ("servers", "address"),
    [
        ("broker:9093", "broker:9093"),
        ("one:9092,two:9092", "one:9092"),
        (" one , two:9093", "one:9092"),
        ("SASL_SSL://one:9094,SASL_SSL://two:9094", "one:9094"),
        ("[::1]:9095", "[::1]:9095"),
        ("[::1]", "[::1]:9092"),
    ],
)
def test_cluster_is_named_by_its_first_server(servers: str, address: str) -> None:
    assert kafka_address(servers) == address


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("postgresql://ann:secret@db:6432/lake?sslmode=require", ("db:6432", "lake")),
        ("postgresql://ann:secret@db/lake", ("db:5432", "lake")),
        ("postgresql://ann:secret@one:5433,two:5434/lake", ("one:5433", "lake")),
        ("postgresql://ann@[::1]:5433/lake", ("[::1]:5433", "lake")),
        ("postgresql://ann@/lake?host=/var/run/postgresql&port=5433", ("localhost:5433", "lake")),
        ("postgresql://ann@db", ("db:5432", "ann")),
    ],
)
def test_database_is_named_by_its_first_server_without_the_login(url: str, address: tuple[str, str], tmp_path: Path) -> None:
    """The same holds if the URL is in a file."""
    file = tmp_path / "url"
    file.write_text(url)
    assert postgres_address(url) == postgres_address(file) == address


def test_attempt_shows_no_password() -> None:
    """The provider may write an operator's attributes into an event."""
    attempt = Consumed("orders", 1, ("lake.orders",), ("orders",), "broker:9092", "postgresql://ann:secret@db/lake")
    assert "secret" not in repr([attempt])
