"""Loads consumers from one file, a folder, or one name in a folder."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from tidemark import project
from tidemark.errors import BadInput
from tidemark.spec import checks, rules
from tidemark.spec.explain import explain, unknown_key
from tidemark.spec.model import FILLED_IN, ConsumerSpec, written_out
from tidemark.spec.partial import partial_spec
from tidemark.spec.problem import MAX_PROBLEMS, KeyPath, Problem, SpecInvalid, UnknownConsumer, shown
from tidemark.spec.source import Parsed, beginning, read

log = logging.getLogger(__name__)

_ENDINGS = (".yaml", ".yml")


@dataclass(slots=True)
class _Loaded:
    """A file while it is loaded: its spec if valid, its problems, and its group, even if the rest is invalid."""

    name: str
    parsed: Parsed
    group: str | None = None
    spec: ConsumerSpec | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.parsed.places.source.path

    def add(self, path: KeyPath, message: str, fix: str) -> None:
        self.problems.append(self.parsed.places.problem(path, message, fix))

    def error(self) -> SpecInvalid:
        ordered = sorted(self.problems, key=lambda problem: (problem.line, problem.column))
        return SpecInvalid(consumers=(self.name,), problems=tuple(dict.fromkeys(ordered)))


def load_consumer(path: Path) -> ConsumerSpec:
    """Loads the consumer of one file. Raises `SpecInvalid` with all problems of the file.

    `read_folder` and `find_consumer` also detect conflicts between files, such as two that claim the same group.
    """
    loaded = _load(path)
    if loaded.spec is None:
        raise loaded.error()
    return loaded.spec


def consumer_names(folder: Path | None = None) -> list[str]:
    """The names of a folder's consumers, sorted, without reading the files. Raises `BadInput` if the folder does not exist."""
    return sorted({path.stem for path in _paths(folder or project.consumers())})


def read_folder(
    folder: Path | None = None, only: Callable[[str], bool] = lambda _: True
) -> tuple[dict[str, ConsumerSpec], list[SpecInvalid]]:
    """A folder's valid consumers by name, and an error for each other file; both sorted by name. ``only`` selects names.

    The default folder is the project's ``include/consumers``. Two files that claim the same group are both refused, and so are two with
    the same name (``a.yaml`` and ``a.yml``). Raises `BadInput` if the folder does not exist.
    """
    loaded = _read(folder or project.consumers(), only)
    good = {file.name: file.spec for file in loaded if file.spec is not None and not file.problems}
    return good, [file.error() for file in loaded if file.problems]


def groups_with_retries() -> set[str]:
    """The groups of the project's consumers with retry topics; for invalid files, the groups that they seem to have."""
    try:
        good, bad = read_folder()
    except BadInput:
        return set()
    return {spec.group for spec in good.values() if spec.retry.delays} | {partial_spec(error.problems[0].file).group for error in bad}


def groups_into(table: str, spec: ConsumerSpec) -> list[str]:
    """The groups of this consumer and of all others in its folder that write to a table, sorted."""
    folder = spec.source.path.parent
    good = read_folder(folder)[0] if folder.is_dir() else {}
    return sorted({spec.group} | {other.group for other in good.values() if table in other.table_names})


def find_consumer(name: str, folder: Path | None = None) -> ConsumerSpec:
    """The consumer of this name. Raises `UnknownConsumer`, which suggests the closest name, or `SpecInvalid` for this file's problems."""
    folder = folder or project.consumers()
    selected = _read(folder, lambda candidate: candidate == name)
    if not selected:
        raise UnknownConsumer(consumer=name, folder=folder, existing=tuple(consumer_names(folder)))
    if selected[0].spec is None or selected[0].problems:
        raise selected[0].error()
    return selected[0].spec


def _paths(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise BadInput(
            what="there is no folder of consumers", found=shown(folder), fix="Run this in the project's folder, or set TIDEMARK_HOME to it."
        )
    return sorted(path for path in folder.iterdir() if path.suffix in _ENDINGS and path.is_file() and not path.name.startswith("."))


def _read(folder: Path, only: Callable[[str], bool]) -> list[_Loaded]:
    """The selected consumers, by name. Reads other files only if they may claim the same group."""
    paths = _paths(folder)
    selected = [_load(path) for path in paths if only(path.stem)]
    groups = {file.group for file in selected if file.group is not None}
    alike = ("".join("[._]" if each in "._" else re.escape(each) for each in group).encode(errors="replace") for group in groups)
    named = re.compile(rb"(?<![\w.-])(%s)(?![\w.-])" % b"|".join(alike))
    others = [_load(path) for path in paths if not only(path.stem) and (path.stem in groups or _may_claim(path, named))]
    _cross_check(sorted([*selected, *others], key=lambda file: file.name))
    return sorted(selected, key=lambda file: file.name)


def _may_claim(path: Path, named: re.Pattern[bytes]) -> bool:
    """Whether this file may claim a group that ``named`` matches: its text contains the group's name literally, or has escapes."""
    try:
        text = beginning(path)
    except OSError:
        return False
    return b"\\" in text or (b"group" in text and named.search(text) is not None)


def _cross_check(loaded: list[_Loaded]) -> None:
    """Adds problems between files: the same name, the same group, or retry topics that collide in Kafka."""
    for file, others in _conflicts(loaded, lambda file: file.name, lambda file: file.path.name):
        file.add((), f'the consumer "{file.name}" is also declared in {others}', "rename one file")
    for file, others in _conflicts(loaded, lambda file: file.group, lambda file: file.name):
        file.add(("group",), f'the group "{file.group}" is also claimed by {others}', "give each consumer its own group")
    with_retries = [file for file in loaded if file.spec is not None and file.spec.retry.delays]
    for file, others in _conflicts(with_retries, lambda file: (file.group or "").replace(".", "_"), lambda file: file.group):
        message = f'the retry topics of group "{file.group}" and of that in {others} have the same names but for "." and "_"'
        file.add(("group",), message, "rename one group: Kafka does not create topics whose names differ only in these")


def _conflicts(
    loaded: Iterable[_Loaded], shared: Callable[[_Loaded], str | None], own: Callable[[_Loaded], str | None]
) -> Iterator[tuple[_Loaded, str]]:
    """The files that share one value but differ in the other, each with the names of the others."""
    by_value: defaultdict[str, list[_Loaded]] = defaultdict(list)
    for file in loaded:
        if (value := shared(file)) is not None:
            by_value[value].append(file)
    for same in by_value.values():
        if len({own(file) for file in same}) > 1:
            yield from ((file, ", ".join(other.path.name for other in same if other is not file)) for file in same)


def _load(path: Path) -> _Loaded:
    parsed = read(path)
    loaded = _Loaded(name=path.stem, parsed=parsed, problems=parsed.problems)
    try:
        checks.consumer_name(path.stem)
    except checks.InvalidValue as error:
        loaded.problems.append(parsed.places.problem_at(0, 0, 0, "", f'"{path.stem}" {error.clause}', error.fix))
    if parsed.data is not None:
        try:
            _validate(loaded, parsed.data)
        except Exception as error:
            log.exception("file not checked file=%s", path)
            loaded.spec = None
            message, fix = f"the file cannot be checked ({type(error).__name__})", "write it simpler, and report this file"
            loaded.problems.append(parsed.places.problem_at(0, 0, 0, "", message, fix))
    return loaded


def _validate(loaded: _Loaded, data: Mapping[str, object]) -> None:
    places = loaded.parsed.places
    unread = tuple(loaded.problems)  # values that could not be read; do not report them twice
    loaded.problems += [unknown_key((key,), places) for key in FILLED_IN if key in data]
    findings = islice(rules.findings({"group": loaded.name, **data}), MAX_PROBLEMS)
    loaded.problems += [places.problem(finding.path, finding.message, finding.fix, at_key=finding.at_key) for finding in findings]
    values = {"group": loaded.name, **written_out(data), "name": loaded.name, "source": places.source}
    loaded.group = values["group"] if isinstance(values["group"], str) else None
    try:
        spec = ConsumerSpec.model_validate(values)
    except ValidationError as error:
        refused = {(problem.key, problem.line, problem.column) for problem in unread}
        explained = explain(error, data, places)
        loaded.problems += [problem for problem in explained if (problem.key, problem.line, problem.column) not in refused]
    else:
        loaded.spec = None if loaded.problems else spec
