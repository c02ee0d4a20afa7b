"""Any file gives a spec or `SpecInvalid`, and every place that the error names is in the file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.sampling import examples

from tidemark.spec import ConsumerSpec, SpecInvalid, explain, load_consumer
from tidemark.spec.source import _BREAK

KEYS = sorted({key.split(".")[-1].removesuffix("[]") for key in explain._TEXTS})
WORDS = st.sampled_from(["range", "upsert", "a:b", "5m", "a.b", "@daily", "*/5 * * * *", "ValueError", "none", "(", "\t", "2024-01-01", ""])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates(), st.binary(max_size=4), WORDS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=5), st.integers()), inner, max_size=4),
    ),
    max_leaves=8,
)
MAPPINGS = st.dictionaries(st.one_of(st.sampled_from(KEYS), SCALARS), VALUES, max_size=8)
CRON = st.text(alphabet="0123456789*/,-LRHh#?() wW", max_size=6)


SMALL = {"topics": ["a"], "transform": "m:f", "sink": {"table": "t"}}
CONTENTS = st.one_of(
    st.builds(lambda one, flow: yaml.safe_dump(one, allow_unicode=True, default_flow_style=flow).encode(), MAPPINGS, st.booleans()),
    st.text(alphabet="ab:-[]{}&*!|>'\"%@`,#?\n\t =<~.0\u2028é", max_size=40).map(str.encode),
    st.binary(max_size=30),
    st.lists(CRON, min_size=4, max_size=6).map(lambda fields: yaml.safe_dump({**SMALL, "schedule": " ".join(fields)}).encode()),
)
"""Mappings, broken YAML, bytes that are no text, and schedules."""


@settings(max_examples=examples(600), suppress_health_check=[HealthCheck.too_slow])
@given(CONTENTS)
def test_any_file_is_a_spec_or_refused(content):
    """No other error is raised, neither YAML's nor the cron library's, and every place in the error is in the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "departures.yaml"
        path.write_bytes(content)
        try:
            assert isinstance(load_consumer(path), ConsumerSpec)
            return
        except SpecInvalid as refused:
            error = refused
    lines = _BREAK.split(content.decode("utf-8", "replace").removeprefix("\ufeff"))
    assert error.problems
    assert str(error)
    for problem in error.problems:
        assert 1 <= problem.line <= len(lines), problem
        assert 1 <= problem.column <= max(1, len(lines[problem.line - 1])), problem
        assert problem.column + problem.length - 1 <= len(lines[problem.line - 1]), problem
        assert "\n" not in problem.message + problem.fix + problem.text, problem
        assert "Input should" not in problem.message, problem
