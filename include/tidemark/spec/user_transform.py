"""Imports the user's transform and determines its form. The only module of `tidemark.spec` that runs the user's code.

Errors in the transform are reported as problems of the consumer's file, at its ``transform:`` key.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

from tidemark.errors import BadInput, message_of
from tidemark.spec import checks
from tidemark.spec.model import ConsumerSpec, RetryOrder
from tidemark.spec.problem import KeyPath, SpecInvalid, shown
from tidemark.text.wording import nearest, quoted

_ANNOTATE = "annotate it: record: Record, batch: pa.RecordBatch or records: DataFrame"
_FOREIGN_FRAMES = ("pandas", "pd", "polars", "pl", "pyspark.pandas", "ps", "dask", "modin")
"""Modules, and their usual aliases, whose DataFrame is not Spark's."""


class Form(StrEnum):
    SPARK = "spark"
    """DataFrame to DataFrame."""
    ARROW = "arrow"
    """RecordBatch to RecordBatch."""
    FUNCTION = "function"
    """A record to a row, several rows, or None."""


@dataclass(frozen=True, slots=True)
class Transform:
    """The user's function and its form."""

    form: Form
    function: Callable[..., Any]
    module: str
    name: str


_NAMES = {"records": Form.SPARK, "df": Form.SPARK, "batch": Form.ARROW, "record": Form.FUNCTION}
"""The form that the name of an untyped first parameter implies."""


class _UnclearForm(Exception):
    """The form cannot be determined or is not supported. Its arguments are the message and the fix."""


def load_transform(spec: ConsumerSpec, folders: Sequence[Path]) -> Transform:
    """Imports the consumer's function. Puts ``folders`` at the front of ``sys.path`` in this order, and leaves them there.

    For a consumer without code, see `tidemark.values.fields.transform_of`.

    Raises `SpecInvalid` if the module or the function does not exist, if importing it raises (with the place in the user's file), if its
    form cannot be determined, or if its form does not support ``retry.order``.
    """
    assert spec.transform is not None
    module_name, _, name = spec.transform.partition(":")
    module = _import(spec, ("transform",), module_name, folders)
    function = getattr(module, name, None)
    if function is None:
        functions = [each for each, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module_name]
        near = nearest(name, functions) or (functions[0] if len(functions) == 1 else None)
        fix = f"write {module_name}:{near}" if near else f"write a function of this name in {_place(module)}"
        raise _invalid(spec, ("transform",), f'transform: module {module_name} has no function "{name}"', fix)
    try:
        form = form_of(function)
    except _UnclearForm as unclear:
        message, fix = unclear.args
        raise _invalid(spec, ("transform",), f"transform: {spec.transform} {message}", fix) from None
    if form is Form.SPARK and spec.retry.order is RetryOrder.KEY:
        message = f"retry.order: {spec.transform} has the Spark form, whose rows do not show which key they come from"
        raise _invalid(spec, ("retry", "order"), message, "write the transform in the Arrow or function form, or remove the key")
    return Transform(form, function, module_name, name)


def load_rehearsed(spec: ConsumerSpec, name: str, folders: Sequence[Path]) -> Transform:
    """Like `load_transform`, for a function that a rehearsal names instead of the consumer's file. Raises `BadInput`."""
    require_rehearsable(spec, name, folders)
    try:
        return load_transform(spec.model_copy(update={"transform": name}), folders)
    except SpecInvalid as error:
        (problem,) = error.problems
        fix = f"{problem.fix}. Nothing was read. For a function of another name, discard this replay and plan again"
        raise _not_rehearsed(problem.message.removeprefix("transform: "), fix) from error


def require_rehearsable(spec: ConsumerSpec, name: str, folders: Sequence[Path]) -> None:
    """Checks that a rehearsal may use this function, without importing it. Its module must be in one of the folders: a role that may
    rewind stores the name, and must not choose among all that Python finds. Raises `BadInput`."""
    if spec.transform is None:
        raise _not_rehearsed(f"{spec.name} has none that another one could replace", "Rehearse consumers with a transform")
    try:
        module = checks.transform_name(name).partition(":")[0]
    except checks.InvalidValue as error:
        raise _not_rehearsed(f"{quoted(name)} {error.clause}", error.fix) from None
    if _file_in(module, folders) is None:
        places = ", ".join(shown(folder) for folder in folders)
        raise _not_rehearsed(f"there is no {module.replace('.', '/')}.py in {places}", "Name a function of a file there")


def _not_rehearsed(problem: str, fix: str) -> BadInput:
    return BadInput(what="transform to rehearse", found=problem, fix=f"{fix[0].upper()}{fix[1:]}.")


def load_permanent(spec: ConsumerSpec, folders: Sequence[Path]) -> tuple[type[Exception], ...]:
    """The exception classes that ``retry.permanent`` names. Raises `SpecInvalid` for a missing class or one that is not an exception."""
    return tuple(_exception(spec, index, name, folders) for index, name in enumerate(spec.retry.permanent))


def form_of(function: object) -> Form:
    """The form of a transform: from the type of its first parameter or of its result, else from the first parameter's name."""
    first, returned = _signature(function)
    by_input = _form_of_annotation(first.annotation, function)
    by_result = _form_of_annotation(_element_type(returned), function)
    if by_input is None and by_result in (Form.SPARK, Form.ARROW):
        return by_result
    by_name = _NAMES.get(first.name)
    if by_input is None and by_result is Form.FUNCTION and by_name not in (None, Form.FUNCTION):
        raise _UnclearForm(f'takes "{first.name}" as the {by_name} form does, but its result is typed otherwise', _ANNOTATE)
    form = by_input or by_name or by_result
    if form is None:
        raise _UnclearForm(f'takes "{first.name}", which does not show the form', _ANNOTATE)
    if by_result is not None and by_result is not form:
        raise _UnclearForm(
            f"takes what the {form} form takes and returns what the {by_result} form returns", "use types of one form for both"
        )
    if form is not Form.FUNCTION and inspect.isgeneratorfunction(function):
        raise _UnclearForm("yields", "return one result; only the form record: Record may yield its rows")
    return form


def _signature(function: object) -> tuple[inspect.Parameter, object]:
    """The parameter that gets the input, and the annotation of the result."""
    if not callable(function):
        raise _UnclearForm(f"is not a function but {type(function).__name__}", "name a function")
    if isinstance(function, type):
        raise _UnclearForm("is a class", "name a function")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise _UnclearForm("is async", "write a plain function: def, not async def")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        raise _UnclearForm("has no readable signature", "wrap it in a function of your own") from None
    parameters = signature.parameters.values()
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if not positional:
        raise _UnclearForm("takes no parameter", "let it take one: record: Record, batch: pa.RecordBatch or records: DataFrame")
    required = [each.name for each in positional[1:] if each.default is each.empty]
    required += [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    if required:
        raise _UnclearForm(f"needs more than one parameter: {', '.join(required)}", "give all but the first one a default")
    return positional[0], signature.return_annotation


def _element_type(annotation: object) -> object:
    """The value type of a dict by sink name; any other type unchanged."""
    if isinstance(annotation, str):
        match = re.fullmatch(r"[\"']?(?:\w+\.)*(?:dict|Dict|Mapping)\[str, *(.+)\][\"']?", annotation.strip())
        return match[1] if match else annotation
    arguments = typing.get_args(annotation)
    return arguments[1] if typing.get_origin(annotation) in (dict, Mapping) and arguments[:1] == (str,) else annotation


def _form_of_annotation(annotation: object, function: object) -> Form | None:
    """The form that a type implies; None without a type."""
    if annotation is inspect.Parameter.empty:
        return None
    if isinstance(annotation, str):
        annotation = _resolved(annotation.strip().strip("'\""), function)
    module, name = _module_and_name(annotation)
    if name == "DataFrame":
        if any(module == foreign or module.startswith(f"{foreign}.") for foreign in _FOREIGN_FRAMES):
            raise _UnclearForm(f"has the type {module}.DataFrame", "take a pyspark.sql.DataFrame, or a pa.RecordBatch and its to_pandas()")
        return Form.SPARK
    if name == "RecordBatch":
        return Form.ARROW
    if name == "Table" and module.partition(".")[0] in ("", "pa", "pyarrow"):
        raise _UnclearForm("has the type pa.Table", "take and return a pa.RecordBatch")
    if name != "Record" and any(other in str(annotation) for other in ("RecordBatch", "DataFrame")):
        raise _UnclearForm(f"has the type {_plain(annotation)}", "write the type itself: pa.RecordBatch or DataFrame")
    return Form.FUNCTION


def _resolved(text: str, function: object) -> object:
    """The object that a dotted name refers to in the function's module; the name itself if it is unbound, for example if it is only
    imported for type checking."""
    value: Any = None
    for index, part in enumerate(text.split(".")):
        names = getattr(inspect.unwrap(function), "__globals__", {}) if callable(function) else {}
        value = names.get(part, text) if index == 0 else getattr(value, part, text)
        if value is text:
            return text
    return value


def _module_and_name(annotation: object) -> tuple[str, str]:
    if isinstance(annotation, str):
        module, _, name = annotation.rpartition(".")
        return module, name
    if isinstance(annotation, type):
        return annotation.__module__, annotation.__name__
    return "", ""


def _plain(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else str(annotation).replace("typing.", "")


def _exception(spec: ConsumerSpec, index: int, name: str, folders: Sequence[Path]) -> type[Exception]:
    path = ("retry", "permanent", index)
    module_name, _, class_name = name.rpartition(".")
    module = _import(spec, path, module_name, folders) if module_name else builtins
    candidate = getattr(module, class_name, None)
    if isinstance(candidate, type) and issubclass(candidate, Exception):
        return candidate
    message = f'retry.permanent[{index}]: {module.__name__} has no exception "{class_name}"'
    kinds = [each for each, value in vars(module).items() if isinstance(value, type) and issubclass(value, Exception)]
    near = nearest(class_name, kinds)
    raise _invalid(spec, path, message, f"write {module.__name__}.{near}" if near else "name a class that is an Exception")


def _import(spec: ConsumerSpec, path: KeyPath, name: str, folders: Sequence[Path]) -> ModuleType:
    import_from(folders)
    own_file = _file_in(name, folders)
    if own_file is not None and name.partition(".")[0] in sys.stdlib_module_names:
        top = name.partition(".")[0]
        message = f"{path[0]}: {shown(own_file)} has the name of the standard library's module {top}"
        raise _invalid(spec, path, message, "rename the file")
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _import_failed(spec, path, name, folders, error) from error
    if own_file is not None and module.__file__ and Path(module.__file__).resolve() != own_file.resolve():
        message = f"{path[0]}: {name} is {shown(Path(module.__file__))}, which hides {shown(own_file)}"
        raise _invalid(spec, path, message, "rename your file")
    return module


def _import_failed(spec: ConsumerSpec, path: KeyPath, name: str, folders: Sequence[Path], error: BaseException) -> SpecInvalid:
    if isinstance(error, ModuleNotFoundError) and error.name and (name == error.name or name.startswith(f"{error.name}.")):
        modules = sorted(file.stem for folder in folders for file in folder.glob("*.py"))
        near = nearest(name, modules)
        places = ", ".join(shown(folder) for folder in folders) or "sys.path"
        fix = f"write {near}" if near else f"put {name.replace('.', '/')}.py into {places}"
        return _invalid(spec, path, f'{path[0]}: module "{error.name}" not found', fix)
    error_text = f"{type(error).__name__}: {message_of(error)}".splitlines()[0][:200]
    return _invalid(spec, path, f"{path[0]}: importing {name} raised {error_text}", f"fix {_user_line(error, folders)}")


def _user_line(error: BaseException, folders: Sequence[Path]) -> str:
    """The traceback's innermost line in the user's files."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown(Path(error.filename))}:{error.lineno}: {(error.text or '').strip()}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    roots = [folder.resolve() for folder in folders]
    own = [frame for frame in frames if any(Path(frame.filename).resolve().is_relative_to(root) for root in roots)]
    last = (own or frames)[-1]
    return f"{shown(Path(last.filename))}:{last.lineno}: {last.line}"


def import_from(folders: Sequence[Path]) -> None:
    """Puts these folders at the front of ``sys.path``, once each. Does nothing if they are already there."""
    entries = list(dict.fromkeys(str(folder.resolve()) for folder in folders))
    if sys.path[: len(entries)] != entries:
        sys.path[:] = entries + [entry for entry in sys.path if entry not in entries]


def _file_in(name: str, folders: Sequence[Path]) -> Path | None:
    parts = name.split(".")
    for folder in folders:
        for file in (folder.joinpath(*parts, "__init__.py"), folder.joinpath(*parts[:-1], f"{parts[-1]}.py")):
            if file.is_file():
                return file
    return None


def _place(module: ModuleType) -> str:
    return shown(Path(module.__file__)) if module.__file__ else module.__name__


def _invalid(spec: ConsumerSpec, path: KeyPath, message: str, fix: str) -> SpecInvalid:
    return spec.invalid(spec.problem(path, message, fix))
