"""The fields that forms share, and the check of keys that are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import Param

from tidemark.text.problems import REASON_CHARACTERS, Problems
from tidemark.text.wording import nearest, quoted

TEXT, NUMBER = ["null", "string"], ["null", "integer"]
LINE_CHARACTERS = 2_000
"""Maximum length of a field that does not hold a list."""
WHY = "Why"


def field(title: str, description: str, section: str, default: Any = None, kind: Any = TEXT, **more: Any) -> Param:
    """A field that may stay as it is."""
    return Param(default, type=kind, title=title, description_md=description, section=section, **more)


def consumer_field(title: str, description: str, section: str, names: Mapping[str, str], **more: Any) -> Param:
    """The required field of one consumer or several, which offers ``names``, with a text for each."""
    return Param(title=title, description_md=description, section=section, examples=list(names), values_display=dict(names), **more)


def reason_field(example: str, section: str = WHY) -> Param:
    """The field of the reason, which is required."""
    return Param(
        type="string",
        minLength=REASON_CHARACTERS,
        maxLength=LINE_CHARACTERS,
        title="Reason",
        description_md=f"At least {REASON_CHARACTERS} characters; kept permanently: *{example}*.",
        section=section,
    )


def refuse_unknown(problems: Problems, conf: Mapping[str, Any], fields: Sequence[str], fixed: str, own: str | None) -> None:
    """Adds a problem for each key of ``conf`` that is not a field of the form, and suggests the closest field. Airflow accepts any key.

    In a DAG of the consumer ``own``, the field ``fixed``, which names consumers, is unknown as well.
    """
    if own is not None and fixed in conf:
        problems.add("conf", f"{fixed} cannot be set: this DAG is for {own} only", "Remove the key.")
    for key in sorted(set(conf) - set(fields)):
        closest = nearest(key, fields)
        problems.add("conf", f"unknown key {quoted(key)}", f"Write {closest}." if closest else f"Valid keys: {', '.join(fields)}.")
