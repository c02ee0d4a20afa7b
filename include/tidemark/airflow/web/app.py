"""The routes of the page: its scripts, and the JSON that they show. All are GET."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Annotated, Any, Literal

import psycopg2
from airflow.api_fastapi.core_api.security import GetUserDep
from fastapi import Depends, FastAPI, HTTPException, Path, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import AfterValidator
from pydantic_core import PydanticSerializationError, to_json

from tidemark.airflow.approvals.records_form import record_numbers
from tidemark.airflow.web import detail, guards, history, offers, overview, preview, retries, source
from tidemark.airflow.web.consumers import problem
from tidemark.airflow.web.guards import AllReadable, Editable, Readable, Rewindable, Sourced
from tidemark.airflow.web.payload import visible
from tidemark.errors import BadInput, TidemarkError
from tidemark.retry.filter import Filter, RecordState
from tidemark.text.storable import BIGINT, INTEGER, is_storable

log = logging.getLogger(__name__)

STATIC = resources.files("tidemark.airflow.web").joinpath("static")
SCRIPTS = frozenset(script.name for script in STATIC.iterdir())
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

TEXT_CHARACTERS = 2_000


def _storable(text: str) -> str:
    if not is_storable(text):
        raise ValueError("Postgres cannot store NUL and surrogate characters")
    return text


Text = Annotated[str, Query(max_length=TEXT_CHARACTERS), AfterValidator(_storable)]
Number = Annotated[int, Path(ge=0, le=BIGINT)]


def _filter(
    state: Annotated[list[RecordState] | None, Query()] = None,
    error: Text | None = None,
    text: Text | None = None,
    tier: Text | None = None,
    topic: Text | None = None,
    partition: Annotated[int | None, Query(ge=0, le=INTEGER)] = None,
    numbers: Text | None = None,
) -> Filter:
    return Filter(
        numbers=record_numbers(numbers),
        states=tuple(state or ()),
        error_type=error,
        error_text=text,
        tier=tier,
        topic=topic,
        partition=partition,
    )


RecordFilter = Annotated[Filter, Depends(_filter)]


app = FastAPI(title="Tidemark", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, dependencies=[guards.plugins])


@app.middleware("http")
async def _with_headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await call_next(request)
    for name, value in HEADERS.items():
        response.headers[name] = value
    response.headers.setdefault("Cache-Control", "no-store")
    return response


@app.exception_handler(TidemarkError)
@app.exception_handler(psycopg2.Error)
def _handle_error(_: Request, error: Exception) -> JSONResponse:
    """Answers 503 for a database that does not answer, and 404 for a number that does not exist."""
    description = problem(error)
    return JSONResponse({"detail": f"{description['problem']}. {description['fix']}"}, 404 if isinstance(error, BadInput) else 503)


@app.get("/{module}.js")
def script(module: str, request: Request) -> Response:
    if f"{module}.js" not in SCRIPTS:
        raise HTTPException(404, f"There is no script {module}.js.")
    text = STATIC.joinpath(f"{module}.js").read_bytes()
    tag = f'"{hashlib.sha256(text).hexdigest()[:16]}"'
    headers = {"Cache-Control": "no-cache", "ETag": tag}
    if request.headers.get("If-None-Match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(text, media_type="text/javascript", headers=headers)


@app.get("/api/groups")
def groups(readable: AllReadable) -> Response:
    return _json(overview.groups(readable))


@app.get("/api/trends")
def trends(readable: AllReadable) -> Response:
    return _json(overview.trends(readable))


@app.get("/api/groups/{consumer}")
def group(consumer: Readable, user: GetUserDep) -> Response:
    return _json(detail.group(consumer) | {"forms": guards.forms(user, consumer), "payloads": guards.may_edit(user, consumer)})


@app.get("/api/groups/{consumer}/transform")
def transform(consumer: Sourced) -> Response:
    return _json(source.source(consumer.spec))


@app.get("/api/groups/{consumer}/form")
def form(consumer: Readable, user: GetUserDep) -> Response:
    """The choices of the forms for a rewind, a redrive and a discard."""
    return _json(offers.offer(consumer.spec) | {"forms": guards.forms(user, consumer)})


@app.get("/api/groups/{consumer}/matching")
def matching(consumer: Readable, kind: Literal["redrive", "discard"], record_filter: RecordFilter) -> Response:
    """How many records a redrive or a discard with this filter would take now."""
    return _json({"records": offers.matching(consumer.spec, kind, record_filter)})


@app.get("/api/groups/{consumer}/rewind-preview")
def rewind_preview(
    consumer: Rewindable,
    readable: AllReadable,
    scenario: Text,
    value: Text = "",
    scope: Text = "all",
    allow_loss: bool = False,
    beside: bool = False,
) -> Response:
    return _json(preview.preview(consumer, readable, preview.PreviewRequest(scenario, value, scope, allow_loss, beside)))


@app.get("/api/rewinds")
def rewinds(readable: AllReadable, consumer: Text | None = None, state: Text | None = None) -> Response:
    return _json(history.rewinds(readable, consumer, state))


@app.get("/api/groups/{consumer}/rewinds/{rewind_id}")
def rewind(consumer: Readable, rewind_id: Number, readable: AllReadable, user: GetUserDep) -> Response:
    return _json(history.rewind(consumer, rewind_id, readable) | {"forms": guards.forms(user, consumer)})


@app.get("/api/groups/{consumer}/rewinds/{rewind_id}/verified")
def rewind_verified(consumer: Readable, rewind_id: Number, readable: AllReadable, user: GetUserDep) -> Response:
    """The changes of the replay. Examples are rows: only of consumers whose payloads the user may see."""
    return _json(history.verified(consumer, rewind_id, {name: guards.may_edit(user, other) for name, other in readable.items()}))


@app.get("/api/retries")
def retries_everywhere(readable: AllReadable) -> Response:
    return _json(retries.everywhere(readable))


@app.get("/api/groups/{consumer}/retries")
def retries_of(consumer: Readable, user: GetUserDep) -> Response:
    return _json(retries.of_consumer(consumer) | {"forms": guards.forms(user, consumer), "payloads": guards.may_edit(user, consumer)})


@app.get("/api/groups/{consumer}/records")
def records(consumer: Readable, record_filter: RecordFilter, after: Annotated[int, Query(ge=0, le=BIGINT)] = 0) -> Response:
    open_only = record_filter if record_filter.states else replace(record_filter, states=retries.OPEN)
    return _json(retries.records(consumer, open_only, after))


@app.get("/api/groups/{consumer}/records/{number}")
def record(consumer: Editable, number: Number, user: GetUserDep) -> Response:
    return _json(retries.record(consumer, number) | {"forms": guards.forms(user, consumer)})


@app.get("/api/validations")
def validations(readable: AllReadable, consumer: Text | None = None, verdict: Text | None = None) -> Response:
    return _json(history.validations(readable, consumer, verdict))


@app.get("/api/groups/{consumer}/validations/{validation_id}")
def validation(consumer: Readable, validation_id: Number, user: GetUserDep) -> Response:
    return _json(history.validation(consumer, validation_id, payloads=guards.may_edit(user, consumer)))


def _audit(
    readable: AllReadable,
    everything: guards.Everything,
    consumer: Text | None = None,
    kind: Text | None = None,
    person: Text | None = None,
) -> Callable[..., dict[str, Any]]:
    return partial(history.audit, readable, consumer=consumer, whole=everything, kind=kind, person=person)


Audit = Annotated[Callable[..., dict[str, Any]], Depends(_audit)]
"""Reads the events that the query in the address chooses."""


@app.get("/api/audit")
def audit(events: Audit) -> Response:
    return _json(events())


@app.get("/api/audit.csv")
def audit_csv(events: Audit) -> Response:
    headers = {"Content-Disposition": 'attachment; filename="tidemark-audit.csv"'}
    return StreamingResponse(history.as_csv(events(limit=history.CSV_EVENTS)), media_type="text/csv", headers=headers)


def _json(value: Any) -> Response:
    """Serializes without FastAPI's own encoder, which is slow for a thousand consumers."""
    try:
        text = to_json(value)
    except PydanticSerializationError:  # a lone surrogate in a text
        text = to_json(_plain(value))
    return Response(text, media_type="application/json")


def _plain(value: Any) -> Any:
    """The value with escapes for lone surrogates."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
