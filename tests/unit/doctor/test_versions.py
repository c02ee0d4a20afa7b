"""What `tidemark doctor` says of versions that were not tried, and of a PySpark whose files another package has."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from tidemark.doctor import tried, versions
from tidemark.doctor.finding import Level
from tidemark.doctor.tried import Result, untried
from tidemark.doctor.versions import examine_pyspark


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Postgres 15 and 17 passed, as did PySpark 4.0 and 4.2; Postgres 19 failed."""
    columns = {
        "postgres-15": Result("2026-01-01", {"postgres": "15.19", "pyspark": "4.2.0"}, passed=9, failed=0, skipped=1),
        "spark-4.0": Result("2026-01-01", {"postgres": "17.2", "pyspark": "4.0.5"}, passed=9, failed=0, skipped=0),
        "postgres-19": Result("2026-01-01", {"postgres": "19.0", "pyspark": "4.2.0"}, passed=8, failed=1, skipped=0),
    }
    monkeypatch.setattr(tried, "results", lambda: columns)


@pytest.mark.parametrize(
    ("installed_versions", "outside"),
    [
        ({"postgres": "15.2", "pyspark": "4.2.9"}, []),
        ({"postgres": "16.1 (Debian 16.1-1.pgdg120+1)", "pyspark": "4.1.0.dev1"}, []),
        ({"postgres": "14.9", "pyspark": "4.10.0"}, ["postgres 14.9 (tried: 15 to 17)", "pyspark 4.10.0 (tried: 4.0 to 4.2)"]),
        ({"postgres": "19.0"}, ["postgres 19.0 (tried: 15 to 17)"]),
        ({"kafka": "0.9", "ruff": "1.0"}, []),
    ],
)
@pytest.mark.usefixtures("results")
def test_versions_outside_of_what_passed(installed_versions: dict[str, str], outside: list[str]) -> None:
    """A release between two that passed counts as tried. A component without any result is not named."""
    assert untried(installed_versions) == outside


def installed(folder: Path, name: str, version: str, files: list[str]) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an environment's packages, still without any."""

    def distribution(name: str) -> metadata.Distribution | None:
        return next(iter(metadata.distributions(name=name, path=[str(tmp_path)])), None)

    monkeypatch.setattr(versions, "_distribution", distribution)
    return tmp_path


def test_environment_with_pyspark_or_with_neither_has_no_finding(site: Path) -> None:
    assert list(examine_pyspark()) == []
    installed(site, "pyspark", "4.2.0", ["pyspark/__init__.py"])
    (site / "pyspark").mkdir()
    (site / "pyspark" / "__init__.py").touch()
    assert list(examine_pyspark()) == []


def test_client_instead_of_pyspark_is_a_failure(site: Path) -> None:
    installed(site, "pyspark-client", "4.2.0", [])
    (found,) = examine_pyspark()
    assert (found.level, found.found) == (Level.FAILURE, "pyspark-client 4.2.0 is installed instead of pyspark, and has no Spark")
    assert found.fix.startswith("pip uninstall -y pyspark-client && pip install 'tidemark-kafka[driver]'; or ")


def test_client_beside_pyspark_is_a_warning(site: Path) -> None:
    installed(site, "pyspark", "4.1.4", [])
    installed(site, "pyspark-client", "4.2.0", [])
    (found,) = examine_pyspark()
    assert found.level is Level.WARNING
    assert "uninstalling either breaks the other" in found.found
    assert "pip install --force-reinstall --no-deps pyspark==4.1.4; or " in found.fix


def test_pyspark_without_the_files_that_the_client_took_along_is_a_failure(site: Path) -> None:
    installed(site, "pyspark", "4.2.0", ["pyspark/__init__.py", "pyspark/jars/spark.jar"])
    (found,) = examine_pyspark()
    assert (found.level, found.fix) == (Level.FAILURE, "pip install --force-reinstall --no-deps pyspark==4.2.0")
    assert "lacks 1 of its files, such as pyspark/__init__.py" in found.found
