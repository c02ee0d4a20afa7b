"""Reads offsets from a file: the CSV that ``kafka-consumer-groups --export`` writes.

    flights,0,1200                 one group: topic, partition, offset
    "departures","flights",0,1200  several groups: the group first

All problems of a file are reported at once, each with its line and what to write instead.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidemark.errors import BadInput, Refused
from tidemark.records.ranges import TopicPartition
from tidemark.spec.problem import Problem, masked, read_utf8, shown
from tidemark.text.storable import BIGINT, INTEGER
from tidemark.text.wording import counted, nearest, quoted

MAX_BYTES = 5_000_000  # far more than any group needs: about 150,000 partitions, one per line
SHOWN = 20
"""Maximum number of problems shown per file; the others are only counted."""

_NUMBER = re.compile(r"\d{1,19}", re.ASCII)
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_COLUMNS = {3: ("topic", "partition", "offset"), 4: ("group", "topic", "partition", "offset")}
_LINE_FIX = "write topic,partition,offset, or group,topic,partition,offset"

Offsets = Mapping[TopicPartition, int]


class OffsetsFileInvalid(Refused):
    """All problems of a file of offsets."""

    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        count = counted(len(self.problems), "problem")
        more = f"{count}, {SHOWN} of them shown" if len(self.problems) > SHOWN else count
        return "\n".join([*map(str, self.problems[:SHOWN]), f"{more}; no offset of the file was used"])


def read_text(path: Path) -> str:
    """Reads a file that a user named on the command line. Raises `BadInput` if it cannot be read or is too large."""
    with contextlib.suppress(OSError, ValueError):  # reading it raises them, too
        if path.stat().st_size > MAX_BYTES:
            raise _too_large(path)
    return read_utf8(path, what="offsets", fix="Name a file that kafka-consumer-groups --export wrote.")


def parse_offsets(text: str, path: Path = Path("offsets")) -> dict[str | None, Offsets]:
    """Returns the offsets in a file's contents by group, `None` if they name no group. ``path`` is its name in messages; it is not opened.

    Raises `OffsetsFileInvalid`, and `BadInput` for contents that are too long.
    """
    if len(text) > MAX_BYTES:
        raise _too_large(path)
    text = text.removeprefix("\ufeff")
    parsed = _ParsedFile(path, text.splitlines())
    _read_csv(text, parsed)
    if not parsed.offsets and not parsed.problems:
        parsed.problem(1, "the file has no offsets", _LINE_FIX)
    if parsed.problems:
        raise OffsetsFileInvalid(problems=tuple(sorted(parsed.problems, key=lambda problem: problem.line)))
    return dict(parsed.offsets)


def _too_large(path: Path) -> BadInput:
    return BadInput(what="offsets", found=f"{shown(path)} has more than {MAX_BYTES:,} bytes", fix="Write one line per partition.")


def offsets_for_groups(offsets: Mapping[str | None, Offsets], groups: Collection[str]) -> dict[TopicPartition, int]:
    """Returns the offsets of these groups; all offsets if the file names no group.

    Raises `BadInput` if the file lacks one of the groups, or has two different offsets for a partition.
    """
    if set(offsets) == {None}:
        return dict(offsets[None])
    named = [name for name in offsets if name is not None]
    if absent := [group for group in groups if group not in offsets]:
        near = nearest(absent[0], named)
        fix = f"Did you mean {near}?" if near else f"It has {', '.join(named)}."
        raise BadInput(what="offsets", found=f"the file has no offsets for {', '.join(absent)}", fix=fix)
    chosen: dict[TopicPartition, int] = {}
    for group in groups:
        for partition, offset in offsets[group].items():
            if chosen.setdefault(partition, offset) != offset:
                found = f"the file has two offsets for {partition} in the groups {', '.join(groups)}"
                raise BadInput(what="offsets", found=found, fix="Plan one group at a time.")
    return chosen


@dataclass
class _ParsedFile:
    """Offsets and problems of a file."""

    path: Path
    lines: list[str]
    offsets: dict[str | None, dict[TopicPartition, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _line_of: dict[tuple[str | None, TopicPartition], int] = field(default_factory=dict)

    def problem(self, line: int, message: str, fix: str, wrong: str = "") -> None:
        """Adds a problem. Marks ``wrong`` in the line, or the whole line if it does not contain that."""
        is_shown = len(self.problems) < SHOWN  # do not search a long line for problems that are not shown
        text = masked(self.lines[line - 1]) if is_shown and 0 < line <= len(self.lines) else ""
        column = max(0, text.find(wrong))
        length = len(wrong) if wrong and wrong in text else len(text.strip())
        column = column if wrong in text and wrong else len(text) - len(text.lstrip())
        self.problems.append(Problem(self.path, line, column + 1, length, "", message, fix, text))

    def add(self, line: int, group: str | None, topic: str, partition: int, offset: int) -> None:
        if self.offsets and (group is None) != (next(iter(self.offsets)) is None):
            self.problem(line, "some entries name a group and others do not", "name it in all entries or in none")
            return
        topic_partition = TopicPartition(topic, partition)
        first_line = self._line_of.setdefault((group, topic_partition), line)
        if first_line != line:
            of_group = f" of group {group}" if group else ""
            self.problem(line, f"{topic_partition}{of_group} appears twice: line {first_line} has it too", "remove one of them")
            return
        self.offsets.setdefault(group, {})[topic_partition] = offset


def _read_csv(text: str, parsed: _ParsedFile) -> None:
    rows = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        for row in rows:
            cells = [cell.strip() for cell in row]
            if any(cells) and not (rows.line_num == 1 and tuple(cells) in _COLUMNS.values()):
                _csv_line(cells, rows.line_num, parsed)
    except csv.Error as error:
        parsed.problem(rows.line_num, f"is not CSV ({error})", "write one partition per line; quote a whole value or nothing")


def _csv_line(cells: list[str], line: int, parsed: _ParsedFile) -> None:
    if len(cells) not in _COLUMNS:
        parsed.problem(line, f"has {counted(len(cells), 'value')}", _LINE_FIX)
        return
    row = dict(zip(_COLUMNS[len(cells)], cells, strict=True))
    good = [_good_name(parsed, line, "group", row["group"])] if "group" in row else []
    good.append(_good_name(parsed, line, "topic", row["topic"]))
    partition = _number(parsed, line, "partition", row["partition"], INTEGER)
    offset = _number(parsed, line, "offset", row["offset"], BIGINT)
    if all(good) and partition is not None and offset is not None:
        parsed.add(line, row.get("group"), row["topic"], partition, offset)


def _good_name(parsed: _ParsedFile, line: int, what: str, name: str) -> bool:
    if _TOPIC.fullmatch(name) if what == "topic" else name:
        return True
    fix = 'letters, digits, ".", "_" and "-", as in Kafka' if what == "topic" else "the group's name"
    parsed.problem(line, f"the {what} is {quoted(name)}", f"write {fix}", name)
    return False


def _number(parsed: _ParsedFile, line: int, what: str, text: str, most: int) -> int | None:
    if _NUMBER.fullmatch(text) and int(text) <= most:
        return int(text)
    parsed.problem(line, f"the {what} is {quoted(text)}", f"write a whole number from 0 to {most}", text)
    return None
