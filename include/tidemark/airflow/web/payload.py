"""A record's payload for the page, within limits that hold for any record."""

from __future__ import annotations

import codecs
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from tidemark.retry.admin import Payload
from tidemark.worker.decoding import Shown

ANSWER_BYTES = 800_000
"""Limit of the JSON for all payloads of an answer together."""
MOST_BYTES = 256 * 1024
"""Limit for a key, a value or a header."""
HEX_BYTES = 4096
DEEPEST = 50
"""JSON that is nested deeper is not indented, because it would be mostly spaces."""
FIRST_HEADER = 1_000
"""Minimum room for a header."""


class Room:
    """The bytes left for an answer."""

    def __init__(self, size: int = ANSWER_BYTES) -> None:
        self._left = size

    def payload(self, payload: Payload, decoded: Mapping[str, Shown]) -> dict[str, Any]:
        """Returns value, key and headers. ``more_headers``: how many had no room."""
        sides = {side: self._bytes(getattr(payload, side), decoded.get(side)) for side in ("value", "key")}
        headers: list[dict[str, Any]] = []
        for name, value in payload.headers:
            if self._left < FIRST_HEADER:
                break
            headers.append({"name": self._text(name)[0], "value": self._bytes(value)})
        return {**sides, "headers": headers, "more_headers": len(payload.headers) - len(headers)}

    def _bytes(self, value: bytes | None, decoded: Shown | None = None) -> dict[str, Any] | None:
        """Returns bytes as hex, as text if they are UTF-8, and as JSON if they are or were decoded. None: Kafka's null. ``cut``: only the
        beginning is shown. ``not_laid_out``: the JSON is too long or nested too deeply."""
        if value is None:
            return None
        part = value[:MOST_BYTES]
        shown: dict[str, Any] = {"bytes": len(value), "cut": len(value) > len(part), "text": None, "json": None, "not_laid_out": False}
        shown["hex"] = part[: min(HEX_BYTES, self._left // 6)].hex(" ")
        self._left -= len(shown["hex"])
        with contextlib.suppress(UnicodeDecodeError):
            whole = codecs.getincrementaldecoder("utf-8")().decode(part, final=not shown["cut"])  # the last character may be cut
            shown["text"], shortened = self._text(whole)
            shown["cut"] |= shortened
        text = decoded.json if decoded is not None else shown["text"] if not shown["cut"] else None
        if text is not None:
            shown["json"], shown["not_laid_out"] = self._indented(text)
        return shown | {"problem": None if decoded is None else decoded.problem}

    def _text(self, text: str) -> tuple[str, bool]:
        """Returns the text, or as much as fits into half of the room, and whether it was cut."""
        shown = text
        while (size := len(to_json(visible(shown)))) > max(self._left // 2, 2):
            shown = shown[: len(shown) // 2]
        self._left -= size
        return visible(shown), len(shown) < len(text)

    def _indented(self, text: str) -> tuple[str | None, bool]:
        try:
            value = json.loads(text)
        except RecursionError:
            return None, True
        except ValueError:
            return None, False
        if _is_deep(value):
            return None, True
        pieces, size = [], 0
        for piece in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
            pieces.append(piece)
            size += len(piece)
            if size > self._left // 2:
                return None, True
        lines = visible("".join(pieces))
        if (size := len(to_json(lines))) > self._left:
            return None, True
        self._left -= size
        return lines, False


def visible(text: str) -> str:
    """Returns the text with lone surrogates as escapes: JSON may have them, an answer cannot."""
    return text.encode("utf-8", "backslashreplace").decode()


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [child for container in level for child in _inner(container)]
        if not level:
            return False
    return True


def _inner(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
