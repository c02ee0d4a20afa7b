"""Every fenced block of the documentation is tested: `CHECKS` has a check for each language, and a block without a check fails.

This module loads consumers' files, parses JSON and exported variables with the product's code, runs Python, and parses each command of a
shell block. Other tests run, with servers, the shell blocks (``test_pages.py``), and SQL and Postgres' settings (``test_grants.py``).
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks import __main__ as benchmarks
from tests.support.documented import HEREDOC, ROOT, Block, blocks, commands, find_command, missing_line, outputs, snippets, text_of

from tidemark.connections import database_url, from_env, kafka_config, on_cluster
from tidemark.db import _without_sources, parsed
from tidemark.errors import BadInput
from tidemark.kafka import oauth
from tidemark.kafka.config import checked, jvm
from tidemark.packages import EXTRAS
from tidemark.quality import load_suite
from tidemark.spec import load_consumer
from tidemark.text.moment import parse_moment

CITIES = ROOT / "template/include/consumers/cities.yaml"
TARGETS = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE)) | {".venv/.ready"}


def consumers_file(block: Block, folder: Path) -> None:
    """The spec's loader accepts the keys, as a whole file or in place of the same keys of the quickstart's consumer."""
    keys = yaml.safe_load(block.code)
    is_whole = {"sink", "sinks"} & set(keys) and {"transform", "format"} & set(keys)
    whole = keys if is_whole else yaml.safe_load(CITIES.read_text(encoding="utf-8")) | keys
    if whole.get("run") == "continuous":
        del whole["schedule"]
        whole.pop("timezone", None)
    (folder / "consumer.yaml").write_text(yaml.safe_dump(whole))
    load_consumer(folder / "consumer.yaml")


def some_json(block: Block, folder: Path) -> None:
    value = json.loads(block.code)
    reader = next((read for key, read in JSON_READERS.items() if key in value), None)
    assert reader is not None, "name what reads it in JSON_READERS"
    reader(value, folder)


def suite(value: dict[str, Any], folder: Path) -> None:
    (folder / "suite.json").write_text(json.dumps(value))
    assert load_suite(folder / "suite.json").expectations


def settings_of_spark(value: dict[str, Any], folder: Path) -> None:
    servers = {"TIDEMARK_DATABASE_URL": "postgresql://db/lake", "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": "k:9092"}
    assert from_env({**servers, "TIDEMARK_SPARK_CONF": json.dumps(value)}).spark_conf == value


def settings_of_kafka(value: dict[str, Any], folder: Path) -> None:
    """They are complete except for the servers. Settings for the JVM's client are valid for Spark's connector."""
    settings = checked({"bootstrap.servers": "k:9092"} | value)
    if any(name.startswith(oauth.JVM) for name in settings):
        jvm(settings)


def extra_of_postgres(value: dict[str, Any], folder: Path) -> None:
    from tidemark.airflow.connections import postgres_url

    extra = json.dumps({"host": "db", "extra": value})
    assert [name for name, _ in _without_sources(postgres_url(as_airflow_reads("x", extra)))[1]] == ["password_callable"]


def extra_of_the_spark_connection(value: dict[str, Any], folder: Path) -> None:
    """Drivers with these settings run on the cluster."""
    master, conf = spark_of_airflow(json.dumps({"conn_type": "spark", "host": "k8s://https://api:6443", "extra": value}))
    assert on_cluster(master, conf)


def conf_of_the_dag_rewind(value: dict[str, Any], folder: Path) -> None:
    """The DAG accepts these keys through the REST API, with the form's defaults for the others."""
    from tidemark.airflow.approvals.rewind_form import form, read_form

    defaults = {name: param.value for name, param in form((), None).items()}
    asked = read_form(defaults | value, value, by="ann")
    assert [spec.name for spec in asked.consumers] == value["consumers"]


def asset_event(value: dict[str, Any], folder: Path) -> None:
    """``tests/e2e/test_rewind_dag.py`` compares it with an event from Airflow."""


JSON_READERS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "expectations": suite,
    "spark.archives": settings_of_spark,
    "bootstrap.servers": settings_of_kafka,
    "spark.jars.packages": settings_of_spark,
    "tidemark.token": settings_of_kafka,
    "tidemark.token.command": settings_of_kafka,
    "password_callable": extra_of_postgres,
    "deploy-mode": extra_of_the_spark_connection,
    "scenario": conf_of_the_dag_rewind,
    "undo_of": asset_event,
}


def python(block: Block, folder: Path) -> None:
    """The code runs. A DAG file must be the README's, from which Airflow loads DAGs in ``test_wheel.py``."""
    if "airflow" in block.code:
        assert block.code in snippets("README.md", "python")
    else:
        exec(compile(block.code, str(block), "exec"), {"__name__": "snippet"})


# Shell


def shell(block: Block, folder: Path) -> None:
    """Bash can parse the block, and each command in it is valid."""
    done = subprocess.run(["bash", "-n"], input=block.code, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    for code in HEREDOC.findall(block.code):
        ast.parse(code)
    for words in commands(block.code):
        while words and re.match(r"[A-Za-z_]+=", words[0]):
            if words[0].endswith(".whl"):
                pip([words[0].partition("=")[2]])
            words = words[1:]
        if words:
            name = words[0].rpartition("/")[2]
            assert name in COMMANDS or name in ELSEWHERE, f"{words[0]}: name what checks it in COMMANDS"
            COMMANDS.get(name, lambda _: None)(words[1:])


def tidemark(words: list[str]) -> None:
    """Typer parses the line: the command, its options, and everything that it requires."""
    command, words = find_command(words)
    assert not hasattr(command, "commands"), f"no such command: {words}"
    for word in words:
        if re.fullmatch(r"[\w-]+\.(?:json|jsonl|csv)", word):
            Path(word).touch()
    command.make_context("tidemark", words)


def make(words: list[str]) -> None:
    for word in words:
        name, given, value = word.partition("=")
        assert f"$({name})" in text_of("Makefile") if given else name in TARGETS, word
        if name == "BENCH_ARGS":
            benchmarks._parser().parse_args(value.split())


def an_interpreter(words: list[str]) -> None:
    match words:
        case ["-c", code]:
            exec(code, {})
        case ["-m", "pytest", file, *_]:
            assert (ROOT / file).is_file()
        case ["-m", "tidemark.spark.build_archive" as module]:
            assert find_spec(module)
        case ["-m", "benchmarks", *options]:
            benchmarks._options(benchmarks._parser().parse_args(options))
        case ["-"]:
            pass  # test_pages.py runs it
        case _:
            assert words[:2] == ["-m", "venv"], words


def pip(words: list[str]) -> None:
    """Not run, because it downloads; ``test_two_environments.py`` installs the wheel. The files and packages must exist."""
    for word in words:
        if word.endswith("==..."):
            assert re.search(rf"^{word.removesuffix('...')}", text_of("requirements.txt"), re.MULTILINE | re.IGNORECASE), word
        elif ".whl" in word:
            wheel, _, extras = word.rpartition("/")[2].removesuffix("]").partition("[")
            assert wheel == f"tidemark_kafka-{version('tidemark-kafka')}-py3-none-manylinux_2_17_x86_64.whl"
            assert set(filter(None, extras.split(","))) <= {*EXTRAS, "all"}
        elif word.startswith("${wheel}["):
            assert set(word.removeprefix("${wheel}[").removesuffix("]").split(",")) <= {*EXTRAS, "all"}


def uv(words: list[str]) -> None:
    """The files of constraints are among those of a release (``make dist``)."""
    match words:
        case ["pip", "install", *names]:
            pip(names)
            for option, file in pairwise(names):
                if option == "--constraint":
                    assert file == "constraints.txt" or (ROOT / "constraints" / file).is_file(), file
        case _:
            assert words[:1] == ["venv"], words


def export(words: list[str]) -> None:
    """The variable can be read. Tidemark's variable and Airflow's connection must be equivalent."""
    name, _, value = words[0].partition("=")
    assert name == "PATH" or name in EXPORTED, f"{name}: name what reads it in EXPORTED"
    if name != "PATH":
        EXPORTED[name](value)


def as_airflow_reads(conn_id: str, value: str) -> Any:
    from airflow.sdk import Connection

    return Connection.from_json(value, conn_id=conn_id)


def kafka_of_airflow(value: str) -> None:
    from tidemark.airflow.connections import kafka_config as kafka_of

    assert kafka_of(as_airflow_reads("tidemark_kafka", value)) == kafka_config(exported())


def spark_of_airflow(value: str) -> tuple[str, Mapping[str, str]]:
    from tidemark.airflow.connections import spark_settings

    return spark_settings(as_airflow_reads("tidemark_spark", value))


def postgres_of_airflow(value: str) -> None:
    from tidemark.airflow.connections import postgres_url

    url = database_url(exported())
    assert isinstance(url, str)
    assert parsed(postgres_url(as_airflow_reads("tidemark_postgres", value))) == parsed(url)


def exported() -> dict[str, str]:
    """The variables that ``docs/deployment/index.md`` exports."""
    words = [words for block in blocks("sh", page="docs/deployment/index.md") for words in commands(block.code) if words[0] == "export"]
    return dict(word.split("=", 1) for _, word in words)


def an_environment(value: str) -> None:
    assert value.endswith("driver/bin/python"), "the README has made this environment"


def a_folder(value: str) -> None:
    assert Path(value).is_absolute()


EXPORTED: dict[str, Callable[[str], object]] = {
    "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": lambda _: kafka_config(exported()),
    "TIDEMARK_KAFKA_CONFIG": lambda _: kafka_config(exported()),
    "TIDEMARK_DATABASE_URL": lambda _: database_url(exported()),
    "AIRFLOW_CONN_TIDEMARK_KAFKA": kafka_of_airflow,
    "AIRFLOW_CONN_TIDEMARK_POSTGRES": postgres_of_airflow,
    "AIRFLOW_CONN_TIDEMARK_SPARK": spark_of_airflow,
    "TIDEMARK_PYTHON": an_environment,
    "TIDEMARK_CACHE": a_folder,
    "TIDEMARK_HOME": a_folder,
    "TIDEMARK_DATABASE_PASSWORD_COMMAND": shlex.split,
}


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "tidemark": tidemark,
    "make": make,
    "python": an_interpreter,
    "python3.11": an_interpreter,
    "python3.12": an_interpreter,
    "pip": pip,
    "uv": uv,
    "export": export,
}
ELSEWHERE = {"airflow", "jq", "psql", "kafka-consumer-groups", "kcat", "venv-pack", "aws", "tar", "eval", "cd", "echo", "tail", "."}
"""Commands that are not checked here. The first run in ``test_teams.py`` and ``test_pages.py``; kcat, venv-pack and aws are not installed.
What ``eval`` evaluates is checked separately."""


# Outputs and drawings


def output_or_drawing(block: Block, folder: Path) -> None:
    if not re.search("[─│]", block.code):
        with pytest.raises(BadInput) as raised:
            parse_moment("2026-10-25 02:30", "Europe/Berlin")
        assert " ".join(block.code.split()) == str(raised.value), "name what prints it"


def output_of_the_block_above(block: Block, folder: Path) -> None:
    """``test_pages.py`` compares it with what the block above prints. Here: there is such a block, and each line matches itself."""
    assert block.code in outputs(block.page).values()
    assert missing_line(block.code, block.code.replace("…", "anything")) is None
    assert missing_line(block.code, "") == block.code.splitlines()[0]


def test_a_page_may_differ_from_the_output_in_times_and_widths_but_not_in_numbers() -> None:
    shown = "a  lag  at\n──────\n0    2  2026-11-28 03:17:19\n1    0  3 min, …\n"
    printed = "before\na   lag  at\n────────\n0     {}  2027-01-02 11:00:01  \nbetween\n1     0  5.2 s, anything\n"
    assert missing_line(shown, printed.format(2)) is None
    assert missing_line(shown, printed.format(3)) == "0    2  2026-11-28 03:17:19"
    assert missing_line("second\nfirst\n", "first\nsecond\n") == "first"


CHECKS: dict[str, Callable[[Block, Path], None]] = {
    "text": output_of_the_block_above,
    "yaml": consumers_file,
    "json": some_json,
    "python": python,
    "sh": shell,
    "": output_or_drawing,
}
ON_POSTGRES = {"sql", "ini"}
"""Languages of the blocks that ``test_grants.py`` runs."""


@pytest.mark.parametrize("block", [block for block in blocks() if block.language not in ON_POSTGRES], ids=str)
def test_block_does_what_it_shows(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMARK_HOME", str(ROOT))
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "airflow"))
    monkeypatch.chdir(tmp_path)
    assert block.language in CHECKS, f"{block}: nothing checks blocks of {block.language}"
    CHECKS[block.language](block, tmp_path)


@pytest.mark.parametrize("block", [block for block in blocks() if block.language != "json"], ids=str)
def test_block_fits_80_columns(block: Block) -> None:
    """The site's column has 80 characters, and a person copies what is visible. JSON is exempt: its strings cannot be wrapped."""
    assert [line for line in block.code.splitlines() if len(line) > 80] == []


def test_every_fence_is_the_edge_of_a_block() -> None:
    """No block is missed because of indentation or nesting that `blocks` does not recognize."""
    for page in {block.page for block in blocks()}:
        assert len(re.findall(r"^\s*(?:```|~~~)", text_of(page), re.MULTILINE)) == 2 * len(blocks(page=page)), page


def test_quickstart_of_a_new_project_is_the_readmes() -> None:
    """Only comments may differ. So a test that runs the project's blocks also covers the README's."""

    def plain(page: str) -> list[str]:
        return [line.split("  #")[0].rstrip() for code in snippets(page, "sh") for line in code.splitlines()]

    steps = plain("template/README.md")
    produce, load = steps.index("python - <<'EOF'"), steps.index("tidemark local airflow up")
    readme = plain("README.md")
    begin = readme.index("python - <<'EOF'")
    assert readme[begin : begin + load - produce] == steps[produce:load]
