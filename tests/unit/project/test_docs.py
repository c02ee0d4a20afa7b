"""Everything that the documentation names exists: files, tests, modules, commands with their options, keys, environment variables, anchors.
The project that `tidemark init` writes is the one that the README shows.

``test_snippets.py`` tests the code blocks.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from tests.support.documented import CLI, PAGES, ROOT, find_command, record, snippets, text_of

from tidemark.driver.launch import PartitionResult
from tidemark.kafka import oauth
from tidemark.retry.messages import NAMES as HEADERS
from tidemark.spec import ConsumerSpec, load_consumer
from tidemark.spec.model import keys_of
from tidemark.transform import Fail

TEMPLATE = ROOT / "template"
LIBRARY = ROOT / "include" / "tidemark"
MADE_BY_THE_READER = {"cities"}
"""Consumers that a page asks the reader to write."""
COUNTERS = re.compile(rf"tidemark\.(\w+\.consume\.)?(records|{'|'.join(field.name for field in fields(PartitionResult))})")
"""Counters in Airflow's statistics, which `tidemark.airflow.lineage.statistics` sends under the names of the counts."""


def inline(page: str) -> list[str]:
    """The texts between backticks on a page, outside its code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL))


# Commands


def check_command(code: str) -> bool:
    words = re.sub(r"\[[^\]]*\]|\.\.\.|…", "", code).split()[1:]
    command, rest = find_command(words)
    options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    is_whole = not (hasattr(command, "commands") and rest and rest[0].islower())
    is_known = command is not CLI or not rest or rest[0].startswith("-")
    return is_whole and is_known and {word for word in rest if word.startswith("--")} <= options


# Keys of a consumer's file


def models(annotation: Any) -> list[type[BaseModel]]:
    """The models in a type such as ``Breaker | None`` or ``tuple[...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [one for part in get_args(annotation) for one in models(part)]


def unknown(keys: list[str], model: type[BaseModel]) -> str | None:
    """The first key, starting from the outermost, that the model does not have."""
    if not keys:
        return None
    if keys[0] not in keys_of(model):
        return keys[0]
    inner = models(keys_of(model)[keys[0]])
    return unknown(keys[2 if keys[0] == "sinks" else 1 :], inner[0]) if inner else None


def paths(value: object, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield above
    for key, below in value.items() if isinstance(value, dict) else ():
        yield from paths(below, (*above, str(key)))


KEYS = keys_of(ConsumerSpec)
OF_OTHER_TOOLS = {("batch", "size"), ("retry", "backoff", "ms")}
"""Kafka Connect's settings that look like keys of a consumer's file."""
NESTED = {name for name, annotation in KEYS.items() if models(annotation)}


@pytest.mark.parametrize("page", PAGES)
def test_keys_of_a_consumers_file_exist(page: str) -> None:
    """Keys are written as ``retry.max_held``, or as mappings: ``retry: {topics: {create: false}}``."""
    named = [tuple(code.split(".")) for code in inline(page) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", code) and code.split(".")[0] in NESTED]
    written = [code for code in inline(page) if code.split(":")[0] in KEYS and re.match(r"[a-z_]+: ", code)]
    written += snippets(page, "yaml")
    for code in written:
        try:
            named += paths(yaml.safe_load(code.replace("{...}", "{}").replace("...", "x").replace("N}", "1}")))
        except yaml.YAMLError:
            pytest.fail(f"{page}: no YAML: {code}")
    named = [one for one in named if one[:1] not in (("spark",), ("partitions",), ("services",)) and one[:1] != ("on",)]
    missing = {".".join(one) for one in {*named} - OF_OTHER_TOOLS if one and one[0] in KEYS and unknown(list(one), ConsumerSpec)}
    assert not missing, page


# Files, modules, tests, variables


SOURCES = [
    path
    for folder in ("include", "dags", "docker", "spark_jobs", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.is_file()
]
NAMES = {path.name for path in SOURCES} | {path.name for path in ROOT.iterdir()} | {path.name for path in (ROOT / "docs").rglob("*.md")}


def exists(name: str) -> bool:
    """Whether it is a module, a name in the source of a module, or a table of the schema. A column after a table's name is not checked."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        below = LIBRARY.joinpath(*parts[1:length])
        source = below.with_suffix(".py") if below.with_suffix(".py").is_file() else below / "__init__.py"
        if source.is_file():
            rest = parts[length:]
            return (
                not rest or (length > 1 and re.search(rf"\b{rest[0]}\b", source.read_text(encoding="utf-8")) is not None) or table(parts[1])
            )
    return False


def table(name: str) -> bool:
    return any(
        re.search(rf"TABLE (?:IF NOT EXISTS )?tidemark\.{name}\b", path.read_text(encoding="utf-8"))
        for path in (ROOT / "sql").glob("*.sql")
    )


@pytest.mark.parametrize("page", PAGES)
def test_environment_variables_exist(page: str) -> None:
    """Each variable is read somewhere."""
    readers = "".join(path.read_text(encoding="utf-8") for path in SOURCES if path.suffix in (".py", ".sh", ".yaml"))
    readers += text_of("docker-compose.yaml") + text_of("Dockerfile") + text_of("Makefile")
    named = set(re.findall(r"(?<![A-Z_])TIDEMARK_[A-Z_]*[A-Z]", text_of(page)))
    assert {name for name in named if name not in readers} == set()


def is_ours(name: str) -> bool:
    """Whether it is one of Tidemark's own Kafka settings."""
    return name == oauth.FUNCTION or name.startswith(f"{oauth.FUNCTION}.")


@pytest.mark.parametrize("page", PAGES)
def test_what_a_sentence_names_exists(page: str) -> None:
    """Commands with their options, targets of make, modules and tables. ``sink/commit.py`` exists below the library, ``test_deaths.py``
    anywhere."""
    targets = re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE)
    for code in inline(page):
        found = True
        if code.startswith("tidemark "):
            found = check_command(code)
        elif re.match(r"make [a-z]", code):
            found = code.split()[1] in targets
        elif re.fullmatch(r"[\w/]+\.(?:py|sql)", code) and Path(code).stem not in MADE_BY_THE_READER and "NNNN" not in code:
            short = code.removeprefix("tidemark/")
            found = (ROOT / code).exists() or (LIBRARY / short).exists() or ("/" not in code and code in NAMES)
        elif re.fullmatch(r"tidemark(?:\.\w+)+", code) and code not in HEADERS and not COUNTERS.fullmatch(code) and not is_ours(code):
            found = exists(code)
        assert found, f"{page}: {code}"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    """Links and paths to tests and modules have to be updated when something moves."""
    text = text_of(page)
    linked = {(ROOT / page).parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text)}
    named = {ROOT / path for path in re.findall(r"`((?:tests|docs|spark_jobs|include|dags|sql|benchmarks)/[\w/.-]+\.\w+)`", text)}
    made_by_the_reader = {path for path in named if path.stem == "cities" or path.stem.startswith("NNNN")}
    assert sorted(str(path) for path in (linked | named) - made_by_the_reader if not path.exists()) == []


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_anchors_exist(page: str) -> None:
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text_of(page)):
        other = (ROOT / page).parent / link if link else ROOT / page
        headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {slug(heading) for heading in headings}, f"{page}: {link}#{anchor}"


# The site


def files(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for below in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from files(below)


def test_site_shows_every_page_and_the_generated_reference(tmp_path: Path) -> None:
    """The navigation and ``llms.txt`` list exactly the pages that ``docs/site.py`` writes, and the reference pages match the code."""
    subprocess.run([sys.executable, ROOT / "docs" / "site.py", tmp_path], check=True)
    written = {str(path.relative_to(tmp_path / "docs")) for path in (tmp_path / "docs").rglob("*.md")}
    assert set(files(yaml.safe_load((tmp_path / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])) == written
    subprocess.run([sys.executable, ROOT / "docs" / "site.py", tmp_path, "--markdown"], check=True)
    listed = re.findall(r"\]\((.*)\)$", (tmp_path / "site" / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(written)
    assert {page for page in listed if not (tmp_path / "site" / page).is_file()} == set()
    reference = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "docs" / "reference").glob("*.md")}
    keys = re.findall(r"^\| `([\w.]+)` \| .+ \| .+ \| (.*) \|$", reference["keys"], re.MULTILINE)
    assert {"group", "sink", "sink.mode", "connections.kafka", "retry.topics.create", "airflow.pool"} <= dict(keys).keys()
    assert [key for key, text in keys if not text.endswith(".")] == [], "add a docstring to these fields of spec/model.py"
    assert "| `retry.max_held` | integer | `10000` |" in reference["keys"]
    assert "## tidemark rewind plan" in reference["commands"]
    assert "## tidemark consume, tidemark retries drain" in reference["json"]
    assert "| `partitions[].lag_records` | integer or null |" in reference["json"]
    assert "`OffsetFenced`" in reference["errors"]
    assert "## partition_offset" in reference["schema"]
    assert "Migration `0005_rewinds.sql`" in reference["schema"], "foreign keys that a later migration adds"


def test_migrations_that_the_code_names_exist() -> None:
    """By file. A number alone says nothing once the files are folded."""
    for path in [*LIBRARY.rglob("*.py"), *LIBRARY.rglob("*.sql")]:
        text = path.read_text(encoding="utf-8")
        assert not [name for name in re.findall(r"sql/(\d{4}_\w+(?:\.\w+)*?\.sql)", text) if not (ROOT / "sql" / name).is_file()], path
        assert not re.search(r"(?i)(migration|before|until|since) 00\d\d\b", text), path


# The examples


@pytest.mark.parametrize(
    ("language", "file"),
    [
        ("yaml", "include/consumers/cities.yaml"),
        ("python", "spark_jobs/transforms/cities.py"),
        ("json", "include/expectations/cities.json"),
    ],
)
def test_readme_shows_the_consumer_that_init_writes(language: str, file: str) -> None:
    assert (TEMPLATE / file).read_text(encoding="utf-8") in snippets("README.md", language)


def test_readme_transform_answers_as_its_comments_say() -> None:
    """A tombstone is skipped, a record without a name fails, and any other record becomes a row."""
    names: dict[str, object] = {}
    exec((TEMPLATE / "spark_jobs/transforms/cities.py").read_text(encoding="utf-8"), names)
    transform = names["transform"]
    assert callable(transform)
    assert transform(record({"name": "Ulm", "population": 128_928, "river": "Danube"})) == {"name": "Ulm", "population": 128_928}
    assert transform(record(None)) is None
    with pytest.raises(Fail, match="no name"):
        transform(record({"population": 1}))


def test_reference_shows_every_key_of_a_consumers_file(tmp_path: Path) -> None:
    """The page's examples are valid files. They have all keys except those that exclude the others, which another page shows."""
    shown = snippets("docs/reference/consumer.md", "yaml") + snippets("docs/consumers.md", "yaml")
    text, continuous, several = (next(one for one in shown if word in one) for word in ("every key", "run: continuous", "sinks:"))
    without_code = next(one for one in snippets("docs/formats.md", "yaml") if "skip_if" in one)
    live = re.sub(r"^(run|schedule|timezone):.*\n", "", text, flags=re.MULTILINE) + continuous
    keys = {"topic_pattern"}
    for example in (text, live, several, without_code):
        (tmp_path / "orders.yaml").write_text(example)
        load_consumer(tmp_path / "orders.yaml")
        keys |= set(yaml.safe_load(example))
    assert keys == set(keys_of(ConsumerSpec))


# The invariants, and the front pages


def test_invariants_name_their_code_and_their_tests() -> None:
    page = text_of("docs/architecture.md")
    rows = {match[1]: match[2] for match in re.finditer(r"^\| (I\d) \| (.*) \|$", page, re.MULTILINE)}
    assert list(rows) == [f"I{number}" for number in range(1, 8)]
    for name, row in rows.items():
        _, code, test = row.split(" | ")
        files = [code_file for code_file in re.findall(r"`([\w/]+\.(?:py|sql))`", code) if (LIBRARY / code_file).is_file()]
        tests = [one for one in re.findall(r"`(tests/[\w/]+\.py)`", test) if (ROOT / one).is_file()]
        assert files, f"{name} names no code"
        assert tests, f"{name} names no test"


def has_short_test(file: str) -> bool:
    """Whether ``make test`` runs a test of the file: neither the whole module is marked as thorough, nor each of its tests."""
    text = text_of(file)
    whole = re.search(r"^pytestmark\b.*\bthorough\b", text, re.MULTILINE)
    tests = len(re.findall(r"^(?:def test_|Test\w+ = )", text, re.MULTILINE))
    return not whole and tests > len(re.findall(r"^@pytest\.mark\.thorough\b", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_file_that_a_page_names_has_a_test_of_the_short_run(page: str) -> None:
    named = set(re.findall(r"\btests/[\w/]*/test_\w+\.py\b", text_of(page)))
    assert {file for file in named if not has_short_test(file)} == set()


@pytest.mark.parametrize(
    "package", sorted(path.parent for path in LIBRARY.glob("**/__init__.py") if path.parent != LIBRARY), ids=lambda path: path.name
)
def test_front_page_lists_the_packages_modules(package: Path) -> None:
    """The lines after ``Modules::`` list each module and package in the folder, and no others. A new module needs a line there."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    _, found, block = docstring.partition("Modules::\n\n")
    assert found, f"{package.name}/__init__.py has no list of its modules"
    listed = [line.split()[0] for line in block.split("\n\n")[0].splitlines()]
    modules = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    assert sorted(listed) == sorted(modules - {"__init__"})
