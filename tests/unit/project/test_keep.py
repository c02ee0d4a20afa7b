"""The shortest time for which archives and payloads must be kept is a setting of the deployment, not of the user who asks."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tidemark.errors import BadInput
from tidemark.keep import FLOOR_VARIABLE, KEEP, default_keep, parse_keep
from tidemark.text.duration import parse_duration


@pytest.fixture(autouse=True)
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FLOOR_VARIABLE, raising=False)


def test_a_week_is_the_least_unless_the_settings_say_otherwise() -> None:
    assert parse_keep("7d") == timedelta(days=7)
    for text in ("0s", "6d", "167h"):
        with pytest.raises(BadInput, match=f"keep: {text} is less than 7d.* Write 7d or more.*{FLOOR_VARIABLE}"):
            parse_keep(text)


@pytest.mark.parametrize(("floor", "good", "bad"), [("0s", "0s", None), ("12h", "12h", "11h"), ("60d", "60d", KEEP)])
def test_the_settings_may_lower_and_raise_it(monkeypatch: pytest.MonkeyPatch, floor: str, good: str, bad: str | None) -> None:
    """A floor above the default becomes the default."""
    monkeypatch.setenv(FLOOR_VARIABLE, floor)
    parse_keep(good)
    assert parse_keep(default_keep()) == max(parse_duration(KEEP), parse_duration(floor))
    if bad is not None:
        with pytest.raises(BadInput, match=f"is less than {floor}"):
            parse_keep(bad)


def test_setting_that_is_no_duration_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLOOR_VARIABLE, "a week")
    with pytest.raises(BadInput, match=f'{FLOOR_VARIABLE}: "a week" is not a duration'):
        parse_keep("30d")
