"""The names of a group's retry topics and of its failed topic."""

from __future__ import annotations

from datetime import timedelta

from tidemark.text.duration import format_duration


def retry_topic(group: str, delay: timedelta) -> str:
    """``departures.retry.5m``"""
    return f"{group}.retry.{format_duration(delay)}"


def failed_topic(group: str) -> str:
    """``departures.failed``"""
    return f"{group}.failed"


def is_own(group: str, topic: str) -> bool:
    """Whether ``topic`` is one of the group's retry topics or its failed topic. The group's runs never read these."""
    return topic == failed_topic(group) or topic.startswith(f"{group}.retry.")
