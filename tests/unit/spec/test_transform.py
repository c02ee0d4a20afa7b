"""Finds and imports the user's transform and recognizes its form; and the names that users import for it."""

from __future__ import annotations

import ast
import doctest
import pickle
import re
import sys
import textwrap
from datetime import UTC, datetime
from itertools import count
from typing import Any

import pyarrow as pa
import pytest

import tidemark.transform
from tidemark.errors import BadInput
from tidemark.spec import SpecInvalid, load_consumer
from tidemark.spec.user_transform import Form, form_of, load_permanent, load_rehearsed, load_transform
from tidemark.transform import Fail, NoRow, Record, Retry, Skip

_numbers = count()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Writes a module of transforms with a unique name and a consumer that uses it. Returns the spec, the folder and the module's name."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    folder = tmp_path / "transforms"
    folder.mkdir()

    def project(code: str, function: str = "transform", permanent: str = "[]", module: str | None = None):
        name = f"spec_transform_case_{next(_numbers)}"
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
        path = tmp_path / "departures.yaml"
        path.write_text(
            f"topics: [a]\nsink: {{table: t}}\ntransform: {module or name}:{function}\n"
            f"retry: {{permanent: {permanent.replace('MODULE', name)}}}\n"
        )
        return load_consumer(path), folder, name

    yield project
    for name in set(sys.modules) - before:
        if name.startswith("spec_transform_case_"):
            del sys.modules[name]


def refusal(load, spec, folder):
    """The one problem for which the module is refused. The error has the cause, if the user's code raised one."""
    with pytest.raises(SpecInvalid) as caught:
        load(spec, [folder])
    (problem,) = caught.value.problems
    assert ("raised" in problem.message) <= (caught.value.__cause__ is not None)
    return problem


FORMS = [
    # imports, signature, form
    ("from pyspark.sql import DataFrame", "(x: DataFrame)", Form.SPARK),
    ("from pyspark.sql import DataFrame", "(x) -> DataFrame", Form.SPARK),
    ("from pyspark.sql.dataframe import DataFrame as Frame", "(x: Frame)", Form.SPARK),
    ("import pyspark.sql", "(x: pyspark.sql.DataFrame)", Form.SPARK),
    ("", "(x: 'DataFrame')", Form.SPARK),
    ("", "(x: 'pyspark.sql.DataFrame')", Form.SPARK),
    ("from __future__ import annotations", "(x: sql.DataFrame) -> sql.DataFrame", Form.SPARK),
    ("import pyarrow as pa", "(x: pa.RecordBatch) -> pa.RecordBatch", Form.ARROW),
    ("from pyarrow import RecordBatch as Rows", "(x: Rows)", Form.ARROW),
    ("from __future__ import annotations\nimport pyarrow as p", "(x: p.RecordBatch)", Form.ARROW),
    ("", "(x: 'pa.RecordBatch')", Form.ARROW),
    ("from tidemark.transform import Record", "(x: Record) -> dict", Form.FUNCTION),
    ("from __future__ import annotations\nimport tidemark.transform as t", "(x: t.Record)", Form.FUNCTION),
    ("", "(x: object)", Form.FUNCTION),
    ("", "(x) -> dict", Form.FUNCTION),
    ("", "(record: 'Record') -> None", Form.FUNCTION),
    ("", "(records)", Form.SPARK),
    ("", "(df)", Form.SPARK),
    ("", "(batch)", Form.ARROW),
    ("", "(record)", Form.FUNCTION),
    ("", "(record, /, limit=3, *rest, strict=True, **more)", Form.FUNCTION),
    ("", "(records: 'Record')", Form.FUNCTION),
]


@pytest.mark.parametrize(("imports", "signature", "form"), FORMS, ids=[f"{row[0][-30:]} {row[1]}".strip() for row in FORMS])
def test_the_form_is_told_by_type_and_else_by_name(project, imports, signature, form):
    """The type of the first parameter or the result decides, as an object or as text, however imported. Without types, the name decides."""
    spec, folder, name = project(f"{imports}\ndef transform{signature}: ...\n")
    transform = load_transform(spec, [folder])
    assert (transform.form, transform.module, transform.name) == (form, name, "transform")
    assert transform.function is sys.modules[name].transform


UNCLEAR = [
    ("def transform(x): ...", 'takes "x", which does not show the form', "annotate it"),
    ("def transform(): ...", "takes no parameter", "let it take one"),
    ("def transform(*records): ...", "takes no parameter", "let it take one"),
    ("def transform(record, limit): ...", "needs more than one parameter: limit", "a default"),
    ("def transform(record, *, limit): ...", "needs more than one parameter: limit", "a default"),
    ("async def transform(record): ...", "is async", "def, not async def"),
    ("class transform: ...", "is a class", "name a function"),
    ("transform = 5", "is not a function but int", "name a function"),
    ("def transform(batch: 'pa.Table'): ...", "has the type pa.Table", "pa.RecordBatch"),
    ("import pyarrow as pa\ndef transform(batch: pa.Table): ...", "has the type pa.Table", "pa.RecordBatch"),
    ("import pandas as pd\ndef transform(df: pd.DataFrame): ...", "has the type pandas", "pyspark.sql.DataFrame"),
    ("def transform(df: 'pd.DataFrame'): ...", "has the type pd.DataFrame", "pyspark.sql.DataFrame"),
    (
        "from typing import Iterator\ndef transform(batch: Iterator['pa.RecordBatch']): ...",
        "has the type Iterator",
        "write the type itself",
    ),
    ("def transform(x: 'RecordBatch') -> 'DataFrame': ...", "takes what the arrow form takes and returns what the spark", "of one form"),
    ("def transform(record: 'Record') -> 'DataFrame': ...", "takes what the function form takes", "of one form"),
    ("def transform(records) -> dict: ...", 'takes "records" as the spark form does', "annotate it"),
    ("def transform(batch):\n    yield batch", "yields", "return one result"),
]


@pytest.mark.parametrize(("code", "message", "fix"), UNCLEAR, ids=[row[0].replace("\n", " ") for row in UNCLEAR])
def test_a_form_that_cannot_be_told_is_refused_at_the_transform(project, code, message, fix):
    """The problem is reported at the consumer's `transform:`, and says what to write."""
    spec, folder, _ = project(code)
    problem = refusal(load_transform, spec, folder)
    assert message in problem.message
    assert fix in problem.fix
    assert (problem.line, problem.column, problem.length) == (3, 12, len(spec.transform))


def test_a_callable_object_is_a_function_too(project):
    spec, folder, _ = project("class Made:\n    def __call__(self, record): ...\ntransform = Made()\n")
    assert load_transform(spec, [folder]).form is Form.FUNCTION


FAILING = [
    ("import json\nx = 1\ny = {}['carrier']\n", "raised KeyError: 'carrier'", ".py:3: y = {}['carrier']"),
    ("def transform(record)\n    pass\n", "raised SyntaxError: expected ':'", ".py:1: def transform(record)"),
    ("import no_such_module_anywhere\n", "raised ModuleNotFoundError: No module named 'no_such_module_anywhere'", ".py:1: import no_such"),
    ("import json\njson.loads('{')\n", "raised JSONDecodeError", ".py:2: json.loads('{')"),
    ("raise SystemExit(3)\n", "raised SystemExit: 3", ".py:1: raise SystemExit(3)"),
    ("raise BaseException('panic')\n", "raised BaseException: panic", ".py:1: raise BaseException('panic')"),
]


@pytest.mark.parametrize(("code", "message", "place"), FAILING, ids=[row[1] for row in FAILING])
def test_a_module_that_fails_is_told_with_the_users_own_line(project, code, message, place):
    """The error shows the last frame in the user's files, not one deep in a library."""
    spec, folder, name = project(code)
    problem = refusal(load_transform, spec, folder)
    assert problem.message.startswith(f"transform: importing {name} {message}")
    assert place in problem.fix


def test_a_module_that_is_not_there_is_answered_with_the_nearest(project):
    """If there is no similar module, the error names the missing file and its folder."""
    spec, folder, name = project("", module="spec_transform_cas_0")
    problem = refusal(load_transform, spec, folder)
    assert (problem.message, problem.fix) == ('transform: module "spec_transform_cas_0" not found', f"write {name}")
    spec, folder, _ = project("", module="air.departures")
    assert refusal(load_transform, spec, folder).fix == f"put air/departures.py into {folder}"


def test_a_function_that_is_not_there_is_answered_with_the_nearest(project):
    """The module's own functions are suggested, imported ones are not."""
    spec, folder, name = project("from json import dumps\ndef transform(record): ...\n", function="transfrom")
    problem = refusal(load_transform, spec, folder)
    assert (problem.message, problem.fix) == (f'transform: module {name} has no function "transfrom"', f"write {name}:transform")


def test_the_folders_lead_the_path_once(project, tmp_path):
    """They keep the given order, however often a transform is loaded."""
    spec, folder, _ = project("def transform(record): ...\n")
    other = tmp_path / "more"
    before = list(sys.path)
    for _ in range(3):
        load_transform(spec, [folder, other])
    assert sys.path == [str(folder), str(other), *before]


def test_any_importable_function_may_be_named(project):
    """The function may be in an installed package or in a file."""
    spec, folder, _ = project("", module="textwrap", function="dedent")
    with pytest.raises(SpecInvalid, match="does not show the form"):
        load_transform(spec, [folder])


def test_only_the_projects_own_functions_are_rehearsed(project):
    """A rehearsal's transform is a stored name: it chooses among the files of the folders, not among all that Python finds."""
    spec, folder, name = project("def transform(record): ...\ndef other(batch): ...\n")
    assert load_rehearsed(spec, f"{name}:other", [folder]).form is Form.ARROW
    for wrong, message in {
        "textwrap:dedent": f"there is no textwrap.py in {folder}",
        "air.late:transform": f"there is no air/late.py in {folder}",
        name: "is not module:function",
        f"{name}:third": f'has no function "third". Write {name}:other',
    }.items():
        with pytest.raises(BadInput, match=re.escape(message)):
            load_rehearsed(spec, wrong, [folder])
    with pytest.raises(BadInput, match="departures has none that another one could replace"):
        load_rehearsed(spec.model_copy(update={"transform": None}), f"{name}:other", [folder])


@pytest.mark.parametrize(
    ("module", "message"),
    [("json", "has the name of the standard library's module json"), ("yaml", r"yaml is .*__init__\.py, which hides .*yaml\.py")],
)
def test_a_file_named_like_another_module_is_refused(project, module, message):
    """The other module's function would run instead, or the file would hide Python's module from all other code."""
    spec, folder, _ = project("", module=module)
    (folder / f"{module}.py").write_text("def transform(record): ...\n")
    with pytest.raises(SpecInvalid, match=message):
        load_transform(spec, [folder])


def test_permanent_exceptions_are_classes(project):
    """Built-in exceptions are given by name, others by module and name. All are loaded before the first record is read."""
    spec, folder, name = project("class BadRow(Exception): ...\ndef transform(record): ...\n", permanent="[ValueError, MODULE.BadRow]")
    kinds = load_permanent(spec, [folder])
    assert kinds == (ValueError, sys.modules[name].BadRow)


@pytest.mark.parametrize(("class_name", "fix"), [("BadRaw", "write MODULE.BadRow"), ("Helper", "name a class that is an Exception")])
def test_a_permanent_exception_that_is_none_is_refused_in_its_place(project, class_name, fix):
    """The problem is reported at the entry in the list."""
    spec, folder, name = project("class BadRow(Exception): ...\nclass Helper: ...\n", permanent=f"[KeyError, MODULE.{class_name}]")
    problem = refusal(load_permanent, spec, folder)
    assert (problem.line, problem.column, problem.key) == (4, 31, "retry.permanent[1]")
    assert problem.fix == fix.replace("MODULE", name)


WHEN = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_record_reads_its_value_as_text_and_as_json():
    """A tombstone is None in both. An invalid value raises ValueError, which users usually list as permanent."""
    assert Record("a", 0, 1, WHEN, None, b'{"a": "\xc3\xa9"}').json() == {"a": "é"}
    assert Record("a", 0, 1, WHEN, None, b"\xc3\xa9").text() == "é"
    assert Record("a", 0, 1, WHEN, None, None).text() is None
    assert Record("a", 0, 1, WHEN, None, None).json() is None
    for broken in (b"\xff", b"{"):
        with pytest.raises(ValueError, match=r"decode|Expecting"):
            Record("a", 0, 1, WHEN, None, broken).json()


@pytest.mark.parametrize("kind", [Skip, Fail, Retry])
def test_a_verdict_carries_its_reason_across_processes(kind):
    """It is raised in a worker and reported by the driver."""
    again = pickle.loads(pickle.dumps(kind("no carrier")))
    assert (type(again), again.reason, str(again)) == (kind, "no carrier", "no carrier")
    assert issubclass(kind, NoRow)


@pytest.mark.parametrize(("signature", "refused"), [("(records)", True), ("(batch)", False), ("(record)", False)])
def test_order_by_key_is_refused_where_rows_do_not_say_which_key_they_were_made_of(project, signature, refused):
    """The problem is reported at the file's key `retry.order`."""
    spec, folder, name = project(f"def transform{signature}: ...", permanent="[], delays: [5m], order: key")
    if not refused:
        assert load_transform(spec, [folder]).form is not Form.SPARK
        return
    problem = refusal(load_transform, spec, folder)
    assert problem.key == "retry.order"
    assert problem.message == f"retry.order: {name}:transform has the Spark form, whose rows do not show which key they come from"


def test_the_examples_of_the_users_page_run():
    """The plain-function example runs as a doctest. The others run as modules and have the form that they show."""
    assert doctest.testmod(tidemark.transform).failed == 0
    assert doctest.testmod(tidemark.transform).attempted > 3
    blocks = re.findall(r"::\n\n((?:    .*\n|\n)+)", tidemark.transform.__doc__ or "")
    examples: dict[Form, Any] = {}
    for module in (textwrap.dedent(block) for block in blocks if "import" in block):
        names: dict[str, Any] = {}
        exec(compile(ast.parse(module), "<example>", "exec"), names)
        examples[form_of(names["transform"])] = names["transform"]
    assert list(examples) == [Form.ARROW, Form.SPARK, Form.FUNCTION]
    batch = pa.RecordBatch.from_pydict({"kafka_topic": ["a"], "kafka_partition": [0], "kafka_offset": [7], "value": [b"x"]})
    assert examples[Form.ARROW](batch).to_pydict() == {"kafka_topic": ["a"], "kafka_partition": [0], "kafka_offset": [7], "payload": ["x"]}
