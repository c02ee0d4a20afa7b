"""Encodes decoded values as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec

from tidemark.formats.connect import Misfit


def json_text(value: Any, *, strict: bool = False) -> str:
    """A decoded value as JSON: bytes in base64, times in ISO 8601, decimals as numbers.

    ``strict``: raises `Misfit` for NaN and infinite numbers, which JSON does not have; otherwise they become null.
    """
    try:
        text = _ENCODER.encode(value).decode()
    except (TypeError, ValueError, OverflowError) as error:
        if not strict:
            raise
        raise Misfit(f"holds a value that JSON cannot represent: {type(error).__name__}") from None
    if strict and any(word in text for word in ("null", "NaN", "Infinity")) and not _is_finite(value):
        raise Misfit("has NaN or an infinite number, which JSON cannot represent")
    return text


_ENCODER = msgspec.json.Encoder(decimal_format="number")


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Decimal):
        return value.is_finite()
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list) or all(map(_is_finite, value))
