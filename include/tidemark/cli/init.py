"""``tidemark init``: writes a new project from the files that Tidemark ships, or adds Tidemark to the Airflow project that is there."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from tidemark import project
from tidemark.cli.common import Output, OutputFormat, print_json, print_note, print_text
from tidemark.connections import BOOTSTRAP_SERVERS, DATABASE_URL, SPARK_MASTER
from tidemark.errors import Refused

PARTS = {
    "template": ".",
    "dags": "dags",
    "plugins": "plugins",
    "docker": "docker",
    "docker-compose.yaml": "docker-compose.yaml",
    ".env.example": ".env.example",
}
"""Files and folders of a new project, with their places in it. All but ``template`` are those of Tidemark's own repository."""
DAG_FILE = "tidemark_dags.py"
"""The one file that an Airflow project gets. A file ``tidemark.py`` in the DAGs folder would hide the library."""
ALL_DAGS = "from tidemark.airflow import all_dags\n\nglobals().update(all_dags())\n"
FOLDERS = (project.CONSUMERS, "include/expectations", "spark_jobs/transforms")


class NoAirflowProject(Refused):
    """The folder has files, but no sign of Airflow."""

    folder: Path

    def __str__(self) -> str:
        return (
            f"{self.folder} is neither empty nor an Airflow project: it has no folder dags and no airflow.cfg. Nothing was written. "
            "Name the folder of your Airflow project, or a new or an empty one for a whole project."
        )


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an Airflow project, or a new or an empty one.")] = Path(),
    output: Output = OutputFormat.TABLE,
) -> None:
    new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if new:
        _copy_parts(folder)
        written = project.files_below(folder)
    else:
        written = _add_to(folder)
    print_note("\n".join(f"wrote {path}" for path in written) or "Everything is there already.")
    if output is OutputFormat.JSON:
        print_json({"folder": str(folder.resolve()), "files": [str(path.relative_to(folder)) for path in written]})
    elif new:
        print_note(f"Next: the commands in {folder / 'README.md'}")
    else:
        _print_next_steps(folder.resolve())


def _copy_parts(folder: Path) -> None:
    for part, place in PARTS.items():
        source, target = project.shipped(part), folder / place
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)


def _add_to(folder: Path) -> list[Path]:
    """Adds the DAG file and the folders that are missing. Changes no file. Returns what it wrote."""
    dags = folder / "dags"
    if not dags.is_dir() and not (folder / "airflow.cfg").is_file():
        raise NoAirflowProject(folder=folder)
    written = [folder / name for name in FOLDERS if not (folder / name).exists()]
    for path in written:
        path.mkdir(parents=True)
    if not any("tidemark.airflow" in path.read_text(encoding="utf-8", errors="replace") for path in project.files_below(dags, "*.py")):
        dags.mkdir(exist_ok=True)
        with (dags / DAG_FILE).open("x", encoding="utf-8") as file:
            file.write(ALL_DAGS)
        written.append(dags / DAG_FILE)
    return written


def _print_next_steps(folder: Path) -> None:
    """Prints the connections as commands, with the servers of the environment. Passwords stay in the variables that have them."""
    servers = os.environ.get(BOOTSTRAP_SERVERS) or "localhost:9092"
    connections = {
        "tidemark_kafka": {"conn_type": "kafka", "extra": {"bootstrap.servers": servers}},
        "tidemark_spark": {"conn_type": "spark", "host": os.environ.get(SPARK_MASTER) or "local[*]"},
    }
    values = {"tidemark_postgres": f'"${DATABASE_URL}"'} | {name: f"'{json.dumps(value)}'" for name, value in connections.items()}
    steps = ["", "Where your shell and Airflow's processes find Postgres, Kafka and this project:", ""]
    if not os.environ.get(DATABASE_URL):
        steps.append(f"export {DATABASE_URL}=postgresql://user:password@localhost:5432/database")
    if not os.environ.get(BOOTSTRAP_SERVERS):
        steps.append(f"export {BOOTSTRAP_SERVERS}={servers}")
    if Path(os.environ.get("AIRFLOW_HOME", "")).resolve() != folder:
        steps.append(f"export TIDEMARK_HOME={shlex.quote(str(folder))}")
    steps += [f"export AIRFLOW_CONN_{name.upper()}={value}" for name, value in values.items()]
    steps += ["", "Or store the connections in Airflow:", ""]
    steps += [f"airflow connections add {name} --conn-{'uri' if '$' in value else 'json'} {value}" for name, value in values.items()]
    steps += ["", "Then create Tidemark's schema, and a consumer of a topic, which becomes a DAG:", ""]
    steps += ["tidemark migrate", "tidemark consumers new TOPIC --create-table"]
    print_text("\n".join(steps))
