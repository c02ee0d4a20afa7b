"""The names of a group's retry topics and of its failed topic."""

from __future__ import annotations

import re
from datetime import timedelta

from tidemark.text.duration import format_duration


def retry_topic(group: str, delay: timedelta) -> str:
    """``departures.retry.5m``"""
    return f"{group}.retry.{format_duration(delay)}"


def now_topic(group: str) -> str:
    """``departures.retry.now``: the topic for immediate tries, without a delay."""
    return f"{group}.retry.now"


def failed_topic(group: str) -> str:
    """``departures.failed``"""
    return f"{group}.failed"


FIRST_HEADER = "tidemark.group"
"""The first header that Tidemark adds to a record in a retry topic or a failed topic."""
_NAME = re.compile(r"(?P<group>.+)\.(?:retry\.(?:\d+[smhd]|now)|failed)")


def group_of(topic: str) -> str | None:
    """The group of a topic that is named like a retry topic or a failed topic."""
    match = _NAME.fullmatch(topic)
    return match["group"] if match else None


def is_own(group: str, topic: str) -> bool:
    """Whether ``topic`` is one of the group's retry topics or its failed topic. The group's runs never read these."""
    return group_of(topic) == group
