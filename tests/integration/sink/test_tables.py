"""Consumers that load several tables, with each form of a transform: all tables are loaded together or not at all."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.retry.lab import Lab
from tests.support.kafka_topics import Topics
from tests.support.sampling import examples
from tests.support.scenario import Scenario
from tests.support.shell import tidemark
from tests.support.shop import FORMS, Order, Shop

from tidemark.records.outcome import BadOutput
from tidemark.worker.call_transform import TransformFailed


@pytest.fixture(params=["function", "arrow", pytest.param("spark", marks=pytest.mark.thorough)])
def form(request: pytest.FixtureRequest) -> str:
    if request.param == "spark":
        request.getfixturevalue("session_here")
    return request.param


@pytest.fixture
def shop(scenario: Scenario, form: str) -> Shop:
    return Shop(scenario, form)


def test_all_tables_of_a_slice_commit_together(shop: Shop) -> None:
    """Each table has the record's lineage, and the record's rows are numbered separately in each table."""
    shop.produce({"id": 1, "lines": [3, 4]}, {"id": 2}, {"id": 3, "word": "skip"}, {"id": 4, "lines": [5]})
    shop.run()
    assert shop.loaded() == {1: [3, 4], 2: [], 4: [5]}
    assert shop.scenario.counts() == {"loaded": 3, "skipped": 1, "sink_rows": 6}
    places = "SELECT kafka_offset, kafka_seq FROM {} ORDER BY 1, 2"
    assert shop.scenario.sql(places.format(shop.orders)) == [(0, 0), (1, 0), (3, 0)]
    assert shop.scenario.sql(places.format(shop.lines)) == [(0, 0), (0, 1), (3, 0)]
    assert shop.violations() == []


REFUSED: dict[str, tuple[list[Order], dict[int, list[int]], dict[int, str]]] = {
    "by the second table": ([{"id": 1, "lines": [3]}, {"id": 2, "lines": [7, -1]}], {1: [3]}, {1: "CheckViolation"}),
    "by the first table": ([{"id": 1, "customer": "nobody", "lines": [7]}, {"id": 2}], {2: []}, {0: "CheckViolation"}),
    "with the order that it needs": (
        [{"id": 1, "customer": "nobody"}, {"id": 1, "orphan": True, "lines": [3]}, {"id": 2}],
        *({2: []}, {0: "CheckViolation", 1: "ForeignKeyViolation"}),
    ),
    "unlike a later one with its number": ([{"id": 2, "lines": [-1]}, {"id": 2, "lines": [4]}], {2: [4]}, {0: "CheckViolation"}),
    "as a delete without a key": ([{"id": 1, "lines": [3]}, {"id": 1, "line": None, "word": "delete"}], {1: [3]}, {1: "DeleteWithoutKey"}),
}


@pytest.mark.sampled("case", "form")
@pytest.mark.parametrize("case", REFUSED)
def test_a_record_that_is_refused_by_any_table_is_loaded_into_none(shop: Shop, case: str) -> None:
    """The other records are loaded, even those that are refused only together with another one."""
    orders, loaded, failed = REFUSED[case]
    shop.produce(*orders)
    shop.run()
    assert shop.loaded() == loaded
    found = shop.scenario.failed("record_offset, disposition, error_type")
    assert found == [(offset, "fail", error) for offset, error in failed.items()]
    assert shop.violations() == []


def test_a_record_may_delete_from_one_table(shop: Shop) -> None:
    """The last record of a key wins, within a slice and across slices."""
    shop.produce({"id": 1, "lines": [3, 4]}, {"id": 1, "line": 0, "word": "delete"})
    shop.run()
    shop.produce({"id": 2, "lines": [5]}, {"id": 2, "line": 0, "word": "delete"}, {"id": 1, "line": 1, "word": "delete"})
    shop.run()
    assert shop.loaded() == {1: [], 2: []}
    assert shop.violations() == []


RECORD = st.fixed_dictionaries(
    {"lines": st.lists(st.sampled_from([1, 2, -1]), max_size=3)},
    optional={"customer": st.just("nobody"), "word": st.sampled_from(["skip", "retry"])},
)


@pytest.mark.parametrize("form", ["function", "arrow"])
@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(RECORD, min_size=1, max_size=40))
def test_whatever_is_refused_where(scenario: Scenario, form: str, records: list[Order]) -> None:
    """The loaded orders are those that both tables accept, each with all its lines."""
    scenario.name = f"c{uuid.uuid4().hex[:10]}"
    scenario.table = f"lake.{scenario.name}"
    shop = Shop(scenario, form)
    shop.produce(*({"id": number, **record} for number, record in enumerate(records)))
    shop.run()
    good = {
        number: record["lines"]
        for number, record in enumerate(records)
        if "word" not in record and "customer" not in record and min(record["lines"], default=1) > 0
    }
    assert shop.loaded() == good
    assert shop.violations() == []


def test_a_retried_record_is_loaded_into_all_tables(scenario: Scenario, topics: Topics, form: str) -> None:
    """Or into none, if one of them refuses its row in the retry."""
    lab = Lab(scenario, topics)
    shop = Shop(scenario, form, topic=lab.topic)
    scenario.set(retry={"delays": ["1m"]})
    shop.produce(*({"id": number, "lines": [quantity], "word": "retry"} for number, quantity in ((1, 3), (2, 4), (3, -1))))
    shop.run()
    assert shop.loaded() == {}
    scenario.transform(FORMS[form].replace("retry", "never").replace("word IS NULL", "word = 'retry'"))
    lab.age(timedelta(minutes=2))
    assert lab.relay() == 3
    shop.run(drain=True)
    assert shop.loaded() == {1: [3], 2: [4]}
    assert scenario.failed("record_offset, state") == [(0, "LOADED"), (1, "LOADED"), (2, "FAILED")]
    assert shop.violations() == []


def test_record_whose_row_in_the_second_table_waits_for_another_row_climbs_the_ladder(scenario: Scenario, topics: Topics) -> None:
    """Its row in the first table is taken back, in the first reading and in a drain."""
    lab = Lab(scenario, topics)
    shop = Shop(scenario, "function", topic=lab.topic)
    scenario.set(retry={"delays": ["1m", "1m"]})
    scenario.sql("CREATE TABLE lake.packs (quantity integer PRIMARY KEY); INSERT INTO lake.packs VALUES (3)")
    scenario.sql(f"ALTER TABLE {shop.lines} ADD FOREIGN KEY (quantity) REFERENCES lake.packs")
    shop.produce({"id": 1, "lines": [3]}, {"id": 2, "lines": [3, 4]})
    shop.run()
    states = [scenario.failed("record_offset, state, retry_number, error_type")]
    assert (shop.loaded(), shop.violations()) == ({1: [3]}, [])
    for packs in ("", "INSERT INTO lake.packs VALUES (4)"):
        if packs:
            scenario.sql(packs)
        lab.age(timedelta(minutes=2))
        lab.relay()
        shop.run(drain=True)
        states.append(scenario.failed("record_offset, state, retry_number, error_type"))
        assert shop.violations() == []
    assert states == [[(1, state, number, "ForeignKeyViolation")] for state, number in (("WAITING", 1), ("WAITING", 2), ("LOADED", 2))]
    assert shop.loaded() == {1: [3], 2: [3, 4]}


def test_a_result_that_contradicts_itself_or_is_incomplete_is_refused(scenario: Scenario) -> None:
    """A record has one outcome, however many tables there are. The columns are compared with the tables before anything is read."""
    shop = Shop(scenario, "arrow")
    shop.produce({"id": 1, "lines": [3]})
    scenario.transform(FORMS["arrow"].replace('orders.append({**lineage, "id"', 'orders.append({**lineage, "disposition": "skip", "id"'))
    with pytest.raises(BadOutput, match="record 0 has rows with dispositions skip and load"):
        shop.run()
    scenario.transform(FORMS["arrow"].replace('"lines": pa.RecordBatch', '# "lines": pa.RecordBatch'))
    with pytest.raises(TransformFailed, match="it returned nothing for lines"):
        shop.run()


def test_try_shows_the_rows_of_each_table(scenario: Scenario) -> None:
    """Nothing is stored."""
    shop = Shop(scenario, "function")
    shop.produce({"id": 1, "lines": [3]})
    found = tidemark(scenario, "try", scenario.name, "--output", "json")
    assert found.returncode == 0, found.stderr
    (record,) = json.loads(found.stdout)["records"]
    assert record["rows"] == [{"orders": {"id": 1, "customer": "ann"}}, {"lines": {"order_id": 1, "line": 0, "quantity": 3}}]
    assert shop.loaded() == {}


def test_ddl_and_check_cover_all_tables(scenario: Scenario) -> None:
    """Tables are listed in the order of the file. The first missing table is reported with its DDL."""
    shop = Shop(scenario, "arrow")
    good = tidemark(scenario, "consumers", "check", scenario.name)
    assert good.returncode == 0, good.stdout
    assert [line.split()[1] for line in good.stdout.splitlines() if line.split()[:1] == ["sink"]] == [shop.orders, shop.lines]
    suites = scenario.folder / "expectations"
    suites.mkdir()
    rows = {"type": "expect_table_row_count_to_be_between", "kwargs": {"min_value": 1}}
    (suites / "of_orders.json").write_text(json.dumps({"expectations": [rows]}))
    scenario.set(validation={"suites": {"orders": "of_orders", "lines": "of_lines"}})
    bad = tidemark(scenario, "consumers", "check", scenario.name, env={"TIDEMARK_EXPECTATIONS": str(suites)})
    assert (bad.returncode, 'suite "of_lines" not found' in bad.stdout) == (1, True)
    (suites / "of_lines.json").write_text(json.dumps({"expectations": [rows, rows]}))
    good = tidemark(scenario, "consumers", "check", scenario.name, env={"TIDEMARK_EXPECTATIONS": str(suites)})
    assert good.returncode == 0, good.stdout
    assert [line.partition("suite")[2].strip() for line in good.stdout.splitlines() if line.split()[:1] == ["suite"]] == [
        "of_orders: 1 expectation",
        "of_lines: 2 expectations",
    ]
    scenario.set(validation=None)
    scenario.sql(f"DROP TABLE {shop.lines}")
    bad = tidemark(scenario, "consumers", "check", scenario.name)
    assert bad.returncode == 1
    assert f"Table {shop.lines} does not exist" in bad.stdout
    scenario.sql(f"DROP TABLE {shop.orders}")
    ddl = tidemark(scenario, "sink", "ddl", scenario.name).stdout
    scenario.sql(ddl)
    shop.produce({"id": 1, "lines": [3]})
    shop.run()
    assert shop.loaded() == {1: [3]}
