"""Loads consumers from one file, a folder, or one name in a folder."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from tidemark import project
from tidemark.errors import BadInput
from tidemark.spec import checks, rules
from tidemark.spec.explain import explain, unknown_key
from tidemark.spec.model import FILLED_IN, ConsumerSpec
from tidemark.spec.partial import partial_spec
from tidemark.spec.problem import MAX_PROBLEMS, Problem, SpecInvalid, UnknownConsumer, shown
from tidemark.spec.source import Parsed, beginning, read

log = logging.getLogger(__name__)

_ENDINGS = (".yaml", ".yml")


@dataclass(slots=True)
class _Loaded:
    """A file while it is loaded: its spec if valid, its problems, and the group that it claims (known even if the rest is invalid)."""

    name: str
    parsed: Parsed
    group: str | None = None
    spec: ConsumerSpec | None = None
    problems: list[Problem] = field(default_factory=list)

    def error(self) -> SpecInvalid:
        ordered = sorted(self.problems, key=lambda problem: (problem.line, problem.column))
        return SpecInvalid(consumers=(self.name,), problems=tuple(dict.fromkeys(ordered)))


def load_consumer(path: Path) -> ConsumerSpec:
    """The consumer that one file declares. Raises `SpecInvalid` with all problems of the file.

    `read_folder`, `load_consumers` and `find_consumer` also find conflicts between files, such as two that claim the same group.
    """
    loaded = _load(path)
    if loaded.spec is None:
        raise loaded.error()
    return loaded.spec


def load_consumers(folder: Path | None = None) -> dict[str, ConsumerSpec]:
    """All consumers of a folder by name, sorted. If any file has a problem, raises one `SpecInvalid` with the problems of all files."""
    good, bad = read_folder(folder)
    if bad:
        raise SpecInvalid(
            consumers=tuple(name for error in bad for name in error.consumers),
            problems=tuple(problem for error in bad for problem in error.problems),
        )
    return good


def consumer_names(folder: Path | None = None) -> list[str]:
    """The names of a folder's consumers, sorted. Does not read the files. Raises `BadInput` if the folder does not exist."""
    return sorted({path.stem for path in _paths(folder or project.consumers())})


def read_folder(
    folder: Path | None = None, only: Callable[[str], bool] = lambda _: True
) -> tuple[dict[str, ConsumerSpec], list[SpecInvalid]]:
    """A folder's valid consumers by name, and an error for each other file; both sorted by name. ``only`` selects names.

    The default folder is the project's ``include/consumers``. Two files that claim the same group are both refused, and so are two with
    the same name (``a.yaml`` and ``a.yml``). Raises `BadInput` if the folder does not exist.
    """
    loaded = _read(folder or project.consumers(), only)
    good = {one.name: one.spec for one in loaded if one.spec is not None and not one.problems}
    return good, [one.error() for one in loaded if one.problems]


def groups_with_retries(folder: Path | None = None) -> set[str]:
    """The groups of the project's consumers that have retry topics; of a file with problems, the group that it seems to have."""
    try:
        good, bad = read_folder(folder)
    except BadInput:
        return set()
    return {spec.group for spec in good.values() if spec.retry.delays} | {partial_spec(error.problems[0].file).group for error in bad}


def groups_into(table: str, spec: ConsumerSpec) -> list[str]:
    """The groups of all consumers beside this one that write into a table, and its own, sorted."""
    folder = spec.source.path.parent
    good = read_folder(folder)[0] if folder.is_dir() else {}
    return sorted({spec.group} | {each.group for each in good.values() if table in each.table_names})


def find_consumer(name: str, folder: Path | None = None) -> ConsumerSpec:
    """The consumer of this name. Raises `UnknownConsumer`, which suggests the closest name, or `SpecInvalid` for this file's problems."""
    folder = folder or project.consumers()
    mine = _read(folder, lambda each: each == name)
    if not mine:
        raise UnknownConsumer(consumer=name, folder=folder, known=tuple(consumer_names(folder)))
    if mine[0].spec is None or mine[0].problems:
        raise mine[0].error()
    return mine[0].spec


def _paths(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise BadInput(
            what="there is no folder of consumers", found=shown(folder), fix="Run this in the project's folder, or set TIDEMARK_HOME to it."
        )
    return sorted(path for path in folder.iterdir() if path.suffix in _ENDINGS and path.is_file() and not path.name.startswith("."))


def _read(folder: Path, only: Callable[[str], bool]) -> list[_Loaded]:
    """The selected consumers, by name. Reads other files only if they may claim the same group."""
    paths = _paths(folder)
    mine = [_load(path) for path in paths if only(path.stem)]
    groups = {one.group for one in mine if one.group is not None}
    alike = ("".join("[._]" if each in "._" else re.escape(each) for each in group).encode(errors="replace") for group in groups)
    named = re.compile(rb"(?<![\w.-])(%s)(?![\w.-])" % b"|".join(alike))
    others = [_load(path) for path in paths if not only(path.stem) and (path.stem in groups or _may_claim(path, named))]
    _cross_check(sorted([*mine, *others], key=lambda one: one.name))
    return sorted(mine, key=lambda one: one.name)


def _may_claim(path: Path, named: re.Pattern[bytes]) -> bool:
    """Whether this file may claim a group that ``named`` matches. The text contains the group's name literally, unless it has escapes."""
    try:
        text = beginning(path)
    except OSError:
        return False
    return b"\\" in text or (b"group" in text and named.search(text) is not None)


def _cross_check(loaded: list[_Loaded]) -> None:
    """Adds problems between files: same name, same group, retry topics that Kafka takes for the same."""
    names: defaultdict[str, list[_Loaded]] = defaultdict(list)
    groups: defaultdict[str, list[_Loaded]] = defaultdict(list)
    for one in loaded:
        names[one.name].append(one)
        if one.group is not None:
            groups[one.group].append(one)
    for same in names.values():
        for one in same if len(same) > 1 else ():
            others = _files(same, one)
            one.problems.append(one.parsed.places.problem((), f'the consumer "{one.name}" is also declared in {others}', "rename one file"))
    for group, same in groups.items():
        for one in same if len({each.name for each in same}) > 1 else ():
            others = _files(same, one)
            fix = "give each consumer its own group"
            one.problems.append(one.parsed.places.problem(("group",), f'the group "{group}" is also claimed by {others}', fix))
    alike: defaultdict[str, list[_Loaded]] = defaultdict(list)
    for one in loaded:
        if one.spec is not None and one.spec.retry.delays:
            alike[one.spec.group.replace(".", "_")].append(one)
    for same in alike.values():
        for one in same if len({each.group for each in same}) > 1 else ():
            message = f'the retry topics of group "{one.group}" and of that in {_files(same, one)} have the same names but for "." and "_"'
            fix = "rename one group: Kafka does not create topics whose names differ only in these"
            one.problems.append(one.parsed.places.problem(("group",), message, fix))


def _load(path: Path) -> _Loaded:
    parsed = read(path)
    loaded = _Loaded(name=path.stem, parsed=parsed, problems=parsed.problems)
    try:
        checks.consumer_name(path.stem)
    except checks.NotThis as error:
        context = error.context or {}
        loaded.problems.append(parsed.places.problem_at(0, 0, 0, "", f'"{path.stem}" {context["clause"]}', context["fix"]))
    if parsed.data is not None:
        try:
            _judge(loaded, parsed.data)
        except Exception as error:
            log.exception("file not checked file=%s", path)
            loaded.spec = None
            message, fix = f"the file cannot be checked ({type(error).__name__})", "write it simpler, and report this file"
            loaded.problems.append(parsed.places.problem_at(0, 0, 0, "", message, fix))
    return loaded


def _judge(loaded: _Loaded, data: Mapping[str, object]) -> None:
    places = loaded.parsed.places
    unread = tuple(loaded.problems)  # values that could not be read; do not report them twice
    loaded.problems += [unknown_key((key,), places) for key in FILLED_IN if key in data]
    findings = islice(rules.findings({"group": loaded.name, **data}), MAX_PROBLEMS)
    loaded.problems += [places.problem(one.path, one.message, one.fix, at_key=one.at_key) for one in findings]
    values = {"group": loaded.name, **data, "name": loaded.name, "source": places.source}
    loaded.group = values["group"] if isinstance(values["group"], str) else None
    try:
        spec = ConsumerSpec.model_validate(values)
    except ValidationError as error:
        refused = {(problem.key, problem.line, problem.column) for problem in unread}
        loaded.problems += [one for one in explain(error, data, places) if (one.key, one.line, one.column) not in refused]
    else:
        loaded.spec = None if loaded.problems else spec


def _files(same: list[_Loaded], one: _Loaded) -> str:
    return ", ".join(each.parsed.places.source.path.name for each in same if each is not one)
