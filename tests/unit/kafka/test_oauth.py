"""The settings of Kafka's tokens: what contradicts itself is refused, and each client gets what it understands."""

from __future__ import annotations

from typing import Any

import pytest

from tidemark.connections import Connections
from tidemark.errors import BadInput
from tidemark.kafka import compiled
from tidemark.kafka.config import checked, connected, jvm
from tidemark.spark.engine import SparkEngine
from tidemark.spec import ConsumerSpec
from tidemark.spec.user_transform import Form, Transform
from tidemark.tokens import TokenUnavailable

SASL = {"bootstrap.servers": "a:9092", "security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
CALLBACK = {"kafka.sasl.login.callback.handler.class": "a.b.Handler"}
FAILS = {"tidemark.token.command": "false"}


@pytest.mark.parametrize(
    "settings",
    [
        SASL | {"tidemark.token": "mine:token", "tidemark.token.region": "eu-west-1"},
        SASL | FAILS | CALLBACK,
        SASL | {"sasl.oauthbearer.method": "OIDC", "sasl.oauthbearer.client.id": "x"},
        SASL | {"enable.sasl.oauthbearer.unsecure.jwt": "true"},
    ],
)
def test_settings_that_say_where_tokens_come_from_are_taken_unchanged(settings: dict[str, str]) -> None:
    assert checked(settings) == settings


REFUSED = {
    "nothing": (SASL, "sasl.mechanism: it is OAUTHBEARER, but no setting says where tokens come from"),
    "both": (SASL | FAILS | {"tidemark.token": "a:b"}, "tidemark.token.command: tidemark.token is set too"),
    "oidc too": (SASL | FAILS | {"sasl.oauthbearer.method": "oidc"}, "sasl.oauthbearer.method: with it, librdkafka makes its own tokens"),
    "unsecured too": (SASL | FAILS | {"enable.sasl.oauthbearer.unsecure.jwt": "true"}, "enable.sasl.oauthbearer.unsecure.jwt: with it"),
    "another mechanism": (SASL | FAILS | {"sasl.mechanism": "PLAIN"}, "sasl.mechanism: it is PLAIN, but tokens need OAUTHBEARER"),
    "no SASL": (SASL | FAILS | {"security.protocol": "SSL"}, "security.protocol: it is SSL, so no token would be sent"),
    "empty": (SASL | {"tidemark.token": ""}, "tidemark.token: it is empty"),
    "for no function": (SASL | FAILS | {"tidemark.token.region": "x"}, "tidemark.token.region: it is for the function of tidemark.token"),
    "mistyped": (SASL | {"tidemark.tokens": "a:b"}, "tidemark.tokens: Tidemark does not know it"),
    "not for Spark": (SASL | FAILS | {"kafka.ssl.protocol": "x"}, "kafka.ssl.protocol: Tidemark does not know it"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_settings_that_contradict_themselves_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=f"^Kafka setting {message}"):
        checked(settings)


def test_client_is_not_created_without_a_token() -> None:
    """The error is the command's, and comes at once. A client would wait for its first token, and then report that no broker answers."""
    created: list[Any] = []
    with pytest.raises(TokenUnavailable, match=r"tidemark.token.command: false ended with status 1"):
        connected(created.append, SASL | FAILS)
    library = compiled.library()
    assert library is not None
    with pytest.raises(TokenUnavailable):
        compiled.CompiledPoller(library, SASL | FAILS)
    assert created == []


def test_librdkafka_gets_a_callback_and_none_of_our_settings() -> None:
    """The callback returns the token, when it expires (seconds since 1970), and the principal."""
    settings = SASL | CALLBACK | {"tidemark.token.command": """echo '{"token": "x", "lifetime": 60, "principal": "me"}'"""}
    client_settings = connected(dict, settings)
    token, expires_at, principal, extensions = client_settings.pop("oauth_cb")("")
    assert (client_settings, token, principal, extensions) == (SASL, "x", "me", {})
    assert expires_at > 0


def test_compiled_reader_serves_tokens_from_python_but_not_those_of_librdkafka() -> None:
    """Also with a setting's other name."""
    assert compiled.library_for(SASL | FAILS) is not None
    assert compiled.library_for(SASL | {"sasl.oauthbearer.method": "oidc"}) is None


def test_jvm_gets_the_settings_that_are_for_it_alone() -> None:
    """With a callback of its own, the JVM's client logs in by itself: librdkafka's login is not translated."""
    own = {**CALLBACK, "kafka.sasl.jaas.config": "a.b.Module required;"}
    expected = SASL | {"sasl.login.callback.handler.class": "a.b.Handler", "sasl.jaas.config": "a.b.Module required;"}
    for source in (FAILS, {"sasl.oauthbearer.method": "oidc", "sasl.oauthbearer.client.secret": "s"}):
        assert jvm(SASL | source | own) == expected


@pytest.mark.parametrize("source", [FAILS, {"tidemark.token": "a:b"}])
def test_spark_form_without_a_callback_for_the_jvm_is_refused_before_spark_starts(source: dict[str, str], consumer: ConsumerSpec) -> None:
    """The JVM cannot call Python. The error says what to set."""
    transform = Transform(Form.SPARK, len, "builtins", "len")
    with pytest.raises(BadInput, match=r"cannot call Python or a command\. Set kafka\.sasl\.login\.callback\.handler\.class"):
        SparkEngine(consumer, Connections("postgresql://a/b", SASL | source), transform, (), 1, [])


@pytest.fixture
def consumer() -> ConsumerSpec:
    return ConsumerSpec.model_construct(name="x")
