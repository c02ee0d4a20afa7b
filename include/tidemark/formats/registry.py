"""A client of the schema registry, for the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from tidemark.errors import BadInput, Refused, TidemarkError, Unavailable
from tidemark.formats.limits import AnswerTooLong, Limits
from tidemark.formats.protobuf import Message, compiled
from tidemark.formats.schema import MAX_CHARACTERS, BadSchema, Node, parse, require_small
from tidemark.formats.wire import SchemaId
from tidemark.jvm.errors import without_password

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

RegistryConfig = Mapping[str, Any]
"""Settings of confluent-kafka's client: ``url``, ``basic.auth.user.info``, ``ssl.ca.location``, ..."""

NOT_FOUND = 404
OURS = {"timeout": 15, "max.retries": 2}
"""Seconds to wait for the next bytes of a response, and how often the client retries."""
WHOLE = 2
"""How many times the ``timeout`` a schema with all its references may take."""
MAX_BYTES = 4 * MAX_CHARACTERS
STRANGE = "its answer is not that of a schema registry"
MAX_REFERENCES = 100
"""Maximum number of a schema's references, direct and indirect."""


class RegistryUnavailable(Unavailable):
    """The registry cannot be reached, or answers with an error of its own."""

    url: str
    cause: str

    def __str__(self) -> str:
        return f"The schema registry at {self.url} is not available: {self.cause}. No offset was moved; try again when it is back."


class RegistryRefused(Refused):
    """The registry does not accept this client's credentials."""

    url: str
    cause: str

    def __str__(self) -> str:
        return f"The schema registry at {self.url} refused the request: {self.cause}. Check the connection's credentials."


class SubjectMissing(Refused):
    """A topic has no schema."""

    url: str
    subject: str

    def __str__(self) -> str:
        return (
            f"The schema registry at {self.url} has no subject {self.subject}. Register a schema under this name, as Confluent's "
            "serializers do, or name a schema file in the consumer's file."
        )


def _without_user(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Moves user and password from the URLs into a setting of their own, because the client's library logs the URLs."""
    urls = [urlsplit(url.strip()) for url in str(settings["url"]).split(",")]
    if not all(url.scheme in ("http", "https") and url.netloc and url.geturl().isprintable() for url in urls):
        raise BadInput(
            what="schema registry", found="its settings cannot be used: url is not the URL of a server", fix="Write https://host."
        )
    users = [url.netloc.rpartition("@")[0] for url in urls]
    bare = ",".join(urlunsplit(url._replace(netloc=url.netloc.rpartition("@")[2])) for url in urls)
    named = {"basic.auth.user.info": unquote(users[0])} if users[0] else {}
    return {**named, **settings, "url": bare}


def _seconds(timeout: Any) -> float:
    try:
        seconds = float(timeout)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError("timeout is not a number of seconds")
    return seconds


class Registry:
    """A client, to be used in a ``with`` block. Raises `BadInput` for settings that it does not know."""

    def __init__(self, config: RegistryConfig) -> None:
        from confluent_kafka.schema_registry import SchemaRegistryClient

        settings = _without_user({**OURS, **config})
        self._url = without_password(settings["url"])
        try:
            self._client: SchemaRegistryClient = SchemaRegistryClient(settings)
            rest = self._client._rest_client  # noqa: SLF001 - the client does not accept an httpx client
            tokens = getattr(getattr(rest, "bearer_field_provider", None), "client", None)
            clients = [rest.session] if tokens is None else [rest.session, tokens]
            self._limits = Limits(*clients, within_s=WHOLE * _seconds(settings["timeout"]), max_bytes=MAX_BYTES)
        except Exception as error:  # noqa: BLE001 - errors of the client and of its library
            fix = "Use the names of confluent-kafka's client: basic.auth.user.info, ssl.ca.location."
            problem = without_password(str(error)) if isinstance(error, TypeError | ValueError) else type(error).__name__
            raise BadInput(what="schema registry", found=f"its settings cannot be used: {problem}", fix=fix) from None

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._limits.close()

    def newest(self, subject: str) -> tuple[SchemaId, Node]:
        """The id of a subject's newest Avro schema, and the schema.

        Raises `SubjectMissing`, `BadSchema`, `RegistryUnavailable` or `RegistryRefused`.
        """
        with self._limited():
            newest = self._newest(subject)
            return newest.schema_id, self._parsed(newest.schema)

    def newest_message(self, subject: str, name: str | None) -> Message:
        """The message of this name (default: the first) in a subject's newest Protobuf schema. Raises what `newest` raises."""
        with self._limited():
            schema = self._newest(subject).schema
            text, references = self._text(schema, "PROTOBUF"), dict(self._references(schema))
        return compiled(text, references, name)

    def _newest(self, subject: str) -> Any:
        version = self._answer(lambda: self._client.get_latest_version(subject))
        if version is None:
            raise SubjectMissing(url=self._url, subject=subject)
        return version

    def by_ids(self, ids: Collection[SchemaId]) -> dict[SchemaId, Node | str | None]:
        """Schemas by id: None if the registry does not have it, the reason as text if it is unusable."""
        schemas = {}
        for schema_id in ids:
            with self._limited():
                schemas[schema_id] = self._by_id(schema_id)
        return schemas

    def _by_id(self, schema_id: SchemaId) -> Node | str | None:
        if isinstance(schema_id, int):
            schema = self._answer(lambda: self._client.get_schema(schema_id))
        else:
            schema = self._answer(lambda: self._client.get_schema_by_guid(str(schema_id)))
        try:
            return None if schema is None else self._parsed(schema)
        except BadSchema as error:
            return str(error)

    def _parsed(self, schema: Schema) -> Node:
        return parse(self._text(schema, "AVRO"), [text for _, text in self._references(schema)])

    def _text(self, schema: Schema, kind: str) -> str:
        actual = schema.schema_type or "AVRO"
        if actual != kind:
            raise BadSchema(problem=f"is of type {actual}, not {kind}")
        return self._string(schema)

    def _string(self, schema: Schema) -> str:
        if not isinstance(schema.schema_str, str):
            raise RegistryUnavailable(url=self._url, cause=STRANGE)
        return schema.schema_str

    def _references(
        self, schema: Schema, texts: dict[tuple[str, int], str] | None = None, within: tuple[tuple[str, int], ...] = ()
    ) -> Iterator[tuple[str, str]]:
        """Names and texts of the schemas that this one refers to, dependencies first. ``texts``: those that were read before."""
        texts = {} if texts is None else texts
        for reference in schema.references or ():
            version = (str(reference.subject), int(reference.version or 0))
            if version in within:
                raise BadSchema(problem=f"refers in a circle to {reference.subject} version {reference.version}")
            if version in texts:
                continue
            texts[version] = ""
            if len(texts) > MAX_REFERENCES:
                raise BadSchema(problem=f"has more than {MAX_REFERENCES} references, direct and indirect")
            registered = self._answer(partial(self._client.get_version, *version))
            if registered is None:
                raise BadSchema(problem=f"refers to {reference.subject} version {reference.version}, which the registry does not have")
            texts[version] = self._string(registered.schema)
            require_small(texts.values())
            yield from self._references(registered.schema, texts, (*within, version))
            yield str(reference.name or ""), texts[version]

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        try:
            with self._limits.exchange():
                yield
        except AnswerTooLong as error:
            raise RegistryUnavailable(url=self._url, cause=str(error)) from None

    def _answer(self, request: Callable[[], Any]) -> Any:
        """Returns the response; None for 404."""
        from confluent_kafka.schema_registry.common._httpx_compat import httpx
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        try:
            return request()
        except SchemaRegistryError as error:
            if error.http_status_code == NOT_FOUND:
                return None
            if error.http_status_code in (401, 403):
                raise RegistryRefused(url=self._url, cause=f"status {error.http_status_code}") from None
            raise RegistryUnavailable(url=self._url, cause=f"status {error.http_status_code}") from None
        except (httpx.HTTPError, OSError) as error:
            raise RegistryUnavailable(url=self._url, cause=str(error) or type(error).__name__) from None
        except (AnswerTooLong, TidemarkError, MemoryError):
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            raise RegistryUnavailable(url=self._url, cause=STRANGE) from None
        except Exception as error:  # noqa: BLE001 - such as errors of the OAuth library
            raise RegistryUnavailable(url=self._url, cause=type(error).__name__) from None
