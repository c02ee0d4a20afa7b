"""A consumer's file comes from a team. Whatever it contains, it is loaded or refused within seconds and harms no other team's DAGs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.airflow.dags.consume import consume_dags
from tidemark.sink.table import quoted_table
from tidemark.spec import ConsumerSpec, SpecInvalid, rules
from tidemark.spec.files import find_consumer, load_consumer, read_folder
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
    "schedule: {}",
    "members: {}",
    "columns: {{a: {}}}",
    "topic_pattern: {}",
    "reset: {}",
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


def test_description_of_the_longest_schedule_fits_the_tables_of_airflow(tmp_path: Path) -> None:
    from airflow.models.dag import DagModel
    from airflow.timetables.interval import CronDataIntervalTimetable

    for field, place in (("WED", "* * * * {}"), ("SEP", "* * * {} *"), ("1-2", "{} * * * *"), ("1/2", "* {} * * *"), ("1", "* * {} * *")):
        fields = [field]
        while len(place.format(",".join([*fields, field]))) <= 200:
            fields.append(field)
        schedule = loaded(tmp_path, f"{FILE}schedule: '{place.format(','.join(fields))}'\n").schedule
        assert len(CronDataIntervalTimetable(schedule, timezone="UTC").description) < DagModel.timetable_description.type.length, field


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
        tables = loaded(tmp_path, text).sinks.values()
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


DIGITS = "F" * 6000
COSTLY = {
    "digits in a name": f"format: {{value: json}}\ncolumns: {{a: 0x{DIGITS}}}",
    "base 60": "description: " + ":0" * 100_000,
    "secrets": f"description: [{'token' * 40_000}]",
    "short secrets": "description: [" + ", ".join(["token" * 1_900] * 90) + "]",
    "long line": "{" + ", ".join(f"k{n}: 1" for n in range(400)) + "} #" + "x" * 900_000,
    "names": f"partitions: {{{', '.join(f'u{n}: 0' for n in range(1_600))}}}\ntopics: [{', '.join(f't{n}' for n in range(1_600))}]",
    "members": "members: 100000000",
    "schedule": f"schedule: '{','.join('1' * 1_000)} * * * *'",
}


@pytest.mark.parametrize("what", COSTLY)
def test_costly_file_is_refused_at_once_and_the_others_are_loaded(tmp_path: Path, what: str) -> None:
    (tmp_path / "good.yaml").write_text(FILE)
    (tmp_path / "orders.yaml").write_text(FILE + COSTLY[what] + "\n" if what != "names" else FILE.partition("\n")[2] + COSTLY[what])
    before = time.process_time()
    good, (error,) = read_folder(tmp_path)
    assert (list(good), error.consumers) == (["good"], ("orders",))
    assert len(str(error)) < 200_000
    partial_spec(tmp_path / "orders.yaml")
    assert time.process_time() - before < 10


def test_file_of_any_size_is_read_only_to_the_limit(tmp_path: Path) -> None:
    with (tmp_path / "orders.yaml").open("wb") as file:
        file.truncate(10**13)
    with pytest.raises(SpecInvalid, match="more than 1,000,000 bytes"):
        find_consumer("orders", tmp_path)
    (tmp_path / "good.yaml").write_text(FILE)
    assert find_consumer("good", tmp_path).name == "good"


def test_error_of_a_check_is_a_problem_of_its_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good.yaml").write_text(FILE)
    (tmp_path / "orders.yaml").write_text(FILE + "description: breaks\n")
    findings = rules.findings

    def broken(data: Mapping[str, Any]) -> Iterator[rules.Breach]:
        if data.get("description") == "breaks":
            raise RecursionError
        return findings(data)

    monkeypatch.setattr(rules, "findings", broken)
    good, (error,) = read_folder(tmp_path)
    assert list(good) == ["good"]
    assert "orders.yaml:1:1: the file cannot be checked (RecursionError)" in str(error)


def test_invalid_file_takes_no_dag_from_a_valid_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is made valid for the DAG that shows its problems."""
    (tmp_path / "team_orders.yaml").write_text(FILE)
    for name in ("team orders", "team$orders"):
        (tmp_path / f"{name}.yaml").write_text(FILE)
    monkeypatch.setenv("TIDEMARK_CONSUMERS", str(tmp_path))
    (dag,) = consume_dags().values()
    assert (dag.dag_display_name, "bad spec" in dag.tags) == ("team_orders (consume)", False)


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
        serialized = DagSerialization.to_dict(dag)
        text_of_dag = json.dumps(serialized, ensure_ascii=False)
        assert is_storable(text_of_dag)
        assert "\\u0000" not in text_of_dag
        timetable = DagSerialization.from_dict(serialized).timetable
        for column, value in (
            (DagModel.owners, dag.owner),
            (DagModel.dag_display_name, dag.dag_display_name),
            (DagModel.description, dag.description),
            (DagModel.timetable_summary, timetable.summary),
            (DagModel.timetable_description, timetable.description),
            *((DagTag.name, tag) for tag in dag.tags),
        ):
            length = getattr(column.type, "length", None)
            assert length is None or len(value or "") <= length, column
