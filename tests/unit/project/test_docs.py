"""The examples in the documentation work: they are read from the pages and tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tests.support.documented import PAGES, ROOT, record, snippets, text_of

from tidemark.quality import load_suite
from tidemark.spec import ConsumerSpec, load_consumer
from tidemark.spec.model import keys_of
from tidemark.transform import Fail

TEMPLATE = ROOT / "template"


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


def test_readme_consumer_is_a_good_file() -> None:
    """The first file that a user copies must pass the check."""
    spec = load_consumer(TEMPLATE / "include/consumers/cities.yaml")
    assert (spec.group, spec.table_names, spec.schedule) == ("cities", ("public.cities",), "*/5 * * * *")


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


def test_readme_suite_can_be_loaded() -> None:
    """Great Expectations knows every expectation of the first suite that a user copies."""
    assert len(load_suite(TEMPLATE / "include/expectations/cities.json").expectations) == 1


def test_reference_shows_every_key_of_a_consumers_file(tmp_path: Path) -> None:
    """The page's examples are valid files. They have all keys except those that exclude the others, which another page shows."""
    shown = snippets("docs/consumers.md", "yaml")
    text, continuous, several = (next(one for one in shown if word in one) for word in ("every key", "run: continuous", "sinks:"))
    (tmp_path / "orders.yaml").write_text(text)
    load_consumer(tmp_path / "orders.yaml")
    (tmp_path / "live.yaml").write_text(re.sub(r"^(run|schedule|timezone):.*\n", "", text, flags=re.MULTILINE) + continuous)
    load_consumer(tmp_path / "live.yaml")
    (tmp_path / "tables.yaml").write_text(several)
    load_consumer(tmp_path / "tables.yaml")
    keys = set(yaml.safe_load(text)) | set(yaml.safe_load(continuous)) | set(yaml.safe_load(several))
    without_code = next(one for one in snippets("docs/formats.md", "yaml") if "skip_if" in one)
    (tmp_path / "avro.yaml").write_text(without_code)
    load_consumer(tmp_path / "avro.yaml")
    keys |= set(yaml.safe_load(without_code))
    assert keys | {"topic_pattern"} == set(keys_of(ConsumerSpec))


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    """Links and paths to tests and modules have to be updated when something moves."""
    text = text_of(page)
    linked = {(ROOT / page).parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text)}
    named = {ROOT / path for path in re.findall(r"`((?:tests|docs|spark_jobs|include|dags|sql|benchmarks)/[\w/.-]+\.\w+)`", text)}
    made_by_the_reader = {path for path in named if path.stem == "cities" or path.stem.startswith("NNNN")}
    assert sorted(str(path) for path in (linked | named) - made_by_the_reader if not path.exists()) == []
