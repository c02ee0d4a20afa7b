"""A consumer's file comes from a team. Whatever it contains, it is loaded or refused within seconds and harms no other team's DAGs."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.airflow.dags import consume_dags
from tidemark.sink.table import quoted_table
from tidemark.spec import ConsumerSpec, SpecInvalid
from tidemark.spec.load import load_consumer
from tidemark.spec.partial import partial_spec
from tidemark.text.storable import is_storable

FILE = "topics: [orders]\ntransform: orders:transform\nsink: {table: public.orders}\n"
PLACES = [
    "description: {}",
    "airflow: {{owner: {}}}",
    "airflow: {{tags: [{}]}}",
    "airflow: {{pool: {}}}",
    "spark: {{conf: {{spark.x: {}}}}}",
    "{}: x",
]


def loaded(tmp_path: Path, text: str) -> ConsumerSpec:
    file = tmp_path / "orders.yaml"
    file.write_text(text)
    return load_consumer(file)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("escape", ["\\0", "\\x1b", "\\x7f", "\\ud800", "\\uffff"])
def test_escaped_control_character_is_refused_wherever_it_is(tmp_path: Path, place: str, escape: str) -> None:
    """One NUL in a description breaks the transaction in which Airflow stores all DAGs. The DAG that shows the file's problem does not
    contain it either."""
    with pytest.raises(SpecInvalid, match=r"control character|invalid Unicode character"):
        loaded(tmp_path, FILE + place.format(f'"a{escape}b"') + "\n")
    spec = partial_spec(tmp_path / "orders.yaml")
    shown = f"{spec.description} {spec.airflow} {spec.spark}"
    assert shown.isprintable()


@given(st.text(min_size=1), st.sampled_from(PLACES))
def test_text_of_a_loaded_file_can_be_stored(tmp_path_factory: pytest.TempPathFactory, text: str, place: str) -> None:
    escaped = "".join(f"\\U{ord(character):08x}" for character in text)
    try:
        spec = loaded(tmp_path_factory.mktemp("spec"), FILE + place.format(f'"{escaped}"') + "\n")
    except SpecInvalid:
        return
    stored = f"{spec.description}{spec.airflow.owner}{spec.airflow.tags}{spec.airflow.pool}"
    assert "\0" not in stored
    stored.encode()


@pytest.mark.parametrize(
    "text",
    [
        "description: !!python/object/apply:os.system ['touch {mark}']\n",
        "description: !!python/object/new:type [x, [], {{extend: !!python/name:exec }}]\n",
        "airflow: !!python/module:this\n",
        "description: !include {mark}\n",
        "<<: !!python/object/apply:pathlib.Path.touch [{mark}]\n",
    ],
)
def test_tag_of_yaml_makes_nothing_run(tmp_path: Path, text: str) -> None:
    mark = tmp_path / "ran"
    with pytest.raises(SpecInvalid):
        loaded(tmp_path, FILE + text.format(mark=mark))
    partial_spec(tmp_path / "orders.yaml")
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ['public.a"; DROP TABLE x; --', "public.a'b", "public.a\\", "public.a b", "public.{{ ds }}", "public.%s", "a" * 64]
)
def test_name_of_a_table_is_quoted_or_refused(tmp_path: Path, name: str) -> None:
    """In every statement it goes through `quoted_table`."""
    text = FILE.replace("{table: public.orders}", "{table: " + json.dumps(name) + "}")
    try:
        tables = loaded(tmp_path, text).tables.values()
    except SpecInvalid:
        return
    assert [re.fullmatch(r'("(?:[^"]|"")+"\.?)+', quoted_table(sink.table)) is not None for sink in tables] == [True]


def test_owner_fits_the_tables_of_airflow(tmp_path: Path) -> None:
    assert loaded(tmp_path, FILE + f"airflow: {{owner: {'a' * 500}}}").airflow.owner == "a" * 500
    with pytest.raises(SpecInvalid, match="owner"):
        loaded(tmp_path, FILE + f"airflow: {{owner: {'a' * 501}}}")


@pytest.mark.parametrize(
    "text",
    [
        "spark: {conf: {" + ", ".join(f"a{n}: b" for n in range(50_000)) + "}}\n",
        "topics: [" + ", ".join(f"t{n}" for n in range(20_000)) + "]\n",
        "a: &a [x, x]\n" + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(5_000)),
    ],
    ids=["keys", "topics", "aliases"],
)
def test_file_with_too_many_values_is_refused_at_once(tmp_path: Path, text: str) -> None:
    before = time.process_time()
    with pytest.raises(SpecInvalid, match="more than 5,000 keys and values"):
        loaded(tmp_path, text)
    partial_spec(tmp_path / "orders.yaml")
    assert time.process_time() - before < 10


@given(st.text(min_size=1, max_size=3_000), st.sampled_from(PLACES))
def test_dag_of_any_file_can_be_serialized_and_stored(tmp_path_factory: pytest.TempPathFactory, text: str, place: str) -> None:
    """Also the DAG that shows a file's problems. Airflow stores all DAGs in one transaction, so one text that does not fit would stop the
    DAGs of every team."""
    from airflow.models.dag import DagModel, DagTag
    from airflow.serialization.serialized_objects import DagSerialization

    folder = tmp_path_factory.mktemp("specs")
    escaped = "".join(f"\\U{ord(character):08x}" for character in text)
    (folder / "orders.yaml").write_text(FILE + place.format(f'"{escaped}"') + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEMARK_CONSUMERS", str(folder))
        dags = consume_dags()
    assert list(dags) == ["consume__orders"]
    for dag in dags.values():
        assert is_storable(json.dumps(DagSerialization.to_dict(dag), ensure_ascii=False))
        for column, value in (
            (DagModel.owners, dag.owner),
            (DagModel.dag_display_name, dag.dag_display_name),
            (DagModel.description, dag.description),
            *((DagTag.name, tag) for tag in dag.tags),
        ):
            length = getattr(column.type, "length", None)
            assert length is None or len(value or "") <= length, column
