"""The DAGs of one consumer read nothing from their forms that could name another consumer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import ParamValidationError
from tests.support.forms import REDRIVEN, REWOUND

from tidemark.airflow.approvals import rewind_form
from tidemark.airflow.approvals.records_form import DISCARD_FIELDS, REDRIVE_FIELDS, discard_form, read_records, redrive_form
from tidemark.airflow.approvals.review import Task
from tidemark.airflow.dags.consume import REDRIVE, REWIND
from tidemark.errors import Refused
from tidemark.rewind.scenarios.scenario import SCENARIO_OPTIONS
from tidemark.spec import ConsumerSpec
from tidemark.text.storable import BIGINT, is_storable

read_rewind = partial(rewind_form.read_form, by="ann")
SPEC = "topics: [{name}]\ntransform: t:t\nsink: {{table: public.{name}}}\n"


@pytest.fixture(autouse=True)
def _consumers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("orders", "rides"):
        (tmp_path / f"{name}.yaml").write_text(SPEC.format(name=name))
    monkeypatch.setenv("TIDEMARK_CONSUMERS", str(tmp_path))


@pytest.mark.parametrize(
    ("dag_id", "prefix", "consumer"),
    [("rewind__orders", REWIND, "orders"), ("redrive__a__b", REDRIVE, "a__b"), ("rewind", REWIND, None)],
)
def test_consumer_is_the_one_of_the_dags_id(dag_id: str, prefix: str, consumer: str | None) -> None:
    context: Any = {"dag_run": SimpleNamespace(dag_id=dag_id, run_id="by hand")}
    assert Task(prefix, context, None).own == consumer


def test_dag_of_one_consumer_acts_on_it() -> None:
    """Airflow merges a conf into the params, so a param of that name is ignored, too."""
    for own, name in (("orders", "orders"), (None, "rides")):
        assert [spec.name for spec in read_rewind({**REWOUND, "consumers": ["rides"]}, {}, own).consumers] == [name]
        assert read_records({**REDRIVEN, "consumer": "rides"}, {}, DISCARD_FIELDS, own).spec.name == name


def test_conf_that_names_a_consumer_is_refused() -> None:
    for conf in ({"consumers": ["rides"]}, {"consumers": ["orders"]}):
        with pytest.raises(Exception, match="consumers cannot be set: this DAG is for orders only"):
            read_rewind({**REWOUND, **conf}, conf, "orders")
    with pytest.raises(Exception, match="consumer cannot be set: this DAG is for orders only"):
        read_records({**REDRIVEN, "consumer": "rides"}, {"consumer": "rides"}, DISCARD_FIELDS, "orders")


def test_approval_of_a_redrive_is_for_its_digest() -> None:
    """Airflow records this text with the question."""
    context: Any = {}
    identities = [Task(REDRIVE, context, None).identity(7, digest) for digest in ("ab12", "cd34")]
    assert identities == ["redrive 7, digest ab12", "redrive 7, digest cd34"]


# ---- whatever is sent

PATH = "/etc/hostname"
URL = "http://127.0.0.1:9/walk"
HOSTILE: dict[str, Any] = {
    **{
        repr(text)[:20]: text
        for text in ("", " ", PATH, f"file://{PATH}", "../../etc/hostname", f"@{PATH}", URL, "{{ conf }}", "$(id)", "';--")
    },
    **{f"U+{ord(text[0]):04X}": text for text in ("\0", "a\0b"[1:], "\ud800", "\x1b[31m", "\u202e")},
    **{repr(number): number for number in (-1, 0, 2**31, 2**63, 1e400, 1.5, True)},
    **{repr(other): other for other in ([], [None], [[]], {}, {"a": 1})},
    "a megabyte": "9" * 1_000_000,
    "a megabyte of names": ["orders"] * 100_000,
    "twenty digits": "9" * 20,
    "a list of all": [PATH, "\0", "\ud800", "orders"],
}
SPELLINGS = ("FROM-FILE", " from-file", "From-File\t", "\u0130rom-file", "from\u2010file")
OPENED: list[str] = []
WATCHED = ("open", "socket.connect", "socket.getaddrinfo", "os.system", "subprocess.Popen")


def watch() -> None:
    """Notes files and addresses that are opened while `OPENED` is in use. An audit hook stays indefinitely, so there is one."""

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in WATCHED and any(word in repr(arguments) for word in ("hostname", "127.0.0.1", "walk")):
            OPENED.append(f"{event} {arguments!r}"[:200])

    sys.addaudithook(note)


watch()
RECORDS = REDRIVEN | {"consumer": "orders"}
FORMS: dict[str, tuple[Any, Any, Any]] = {
    "rewind": (rewind_form.form([], None), REWOUND | {"consumers": ["orders"]}, read_rewind),
    "redrive": (redrive_form([], None), RECORDS, partial(read_records, fields=REDRIVE_FIELDS)),
    "discard": (discard_form([], None), RECORDS, partial(read_records, fields=DISCARD_FIELDS)),
}


@pytest.mark.parametrize(("form", "field"), [(name, field) for name, (fields, *_) in FORMS.items() for field in fields])
def test_no_value_of_a_field_opens_a_file_or_ends_in_a_traceback(form: str, field: str) -> None:
    """Airflow checks the value against the field's schema first. What passes is refused with a text, or can be stored."""
    fields, usual, read = FORMS[form]
    scenarios = [word.name for word in SCENARIO_OPTIONS.values()] if field in ("value", "zone", "offsets") else [None]
    OPENED.clear()
    for scenario in scenarios:
        for value in (*HOSTILE.values(), *SPELLINGS):
            sent = {field: value} | ({} if scenario is None else {"scenario": scenario})
            try:
                checked = {name: fields[name].resolve(each) for name, each in sent.items()}
            except ParamValidationError:
                continue
            with contextlib.suppress(Refused):
                assert_storable(read(usual | checked, sent))
    assert OPENED == []


def assert_storable(value: Any) -> None:
    if isinstance(value, str):
        assert is_storable(value)
    elif isinstance(value, int):
        assert -BIGINT <= value <= BIGINT
    elif isinstance(value, Mapping):
        for each in (*value, *value.values()):
            assert_storable(each)
    elif isinstance(value, list | tuple):
        for each in value:
            assert_storable(each)
    elif is_dataclass(value) and not isinstance(value, ConsumerSpec):
        for one in dataclass_fields(value):
            assert_storable(getattr(value, one.name))
