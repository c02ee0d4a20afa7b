"""One set of Kafka settings for two clients: nothing is lost in translation, and users cannot change what Tidemark decides."""

from __future__ import annotations

import pytest

from tidemark.errors import BadInput
from tidemark.kafka.cluster import Cluster
from tidemark.kafka.config import OURS, checked, jvm
from tidemark.kafka.reader import SETTINGS

SERVERS = {"bootstrap.servers": "a:9092,b:9092"}
SECRET = "s3cr3t"


def test_settings_become_text_as_librdkafka_reads_it() -> None:
    """An Airflow connection's extra is JSON, so it may contain numbers, booleans and nulls."""
    given_settings = {**SERVERS, "enable.ssl.certificate.verification": True, "request.timeout.ms": 3000, "client.rack": None}
    assert checked(given_settings) == {**SERVERS, "enable.ssl.certificate.verification": "true", "request.timeout.ms": "3000"}


@pytest.mark.parametrize("config", [{}, {"bootstrap.servers": ""}, {"bootstrap.servers": None}, {"client.id": "x"}])
def test_settings_without_servers_are_refused(config: dict[str, object]) -> None:
    """There is no default broker."""
    with pytest.raises(BadInput, match=r"bootstrap\.servers is missing"):
        checked(config)


@pytest.mark.parametrize("name", sorted(OURS - {"group.id"}))
def test_a_setting_that_decides_what_is_read_or_committed_is_refused(name: str) -> None:
    """It could lose or duplicate records, so the start fails. The message names the setting and its value."""
    with pytest.raises(BadInput, match=f"Kafka setting {name}: it is 'latest'"):
        checked({**SERVERS, name: "latest"})


def test_a_group_id_is_dropped() -> None:
    """Airflow's connection form asks for one, but the spec names the group, and Tidemark never joins a group of Kafka's."""
    assert checked({**SERVERS, "group.id": "airflow"}) == SERVERS


def test_the_reader_sets_every_setting_that_is_tidemarks() -> None:
    """None of them is left to librdkafka's default."""
    assert SETTINGS.keys() >= OURS


@pytest.mark.parametrize("name", ["client.id", "client.rack", "request.timeout.ms", "metadata.max.age.ms", "security.protocol"])
def test_a_setting_that_both_clients_have_is_handed_on(name: str) -> None:
    """Under the same name, with the same value."""
    value = "SSL" if name == "security.protocol" else "3000"
    assert jvm({**SERVERS, name: value})[name] == value


def test_a_setting_that_only_librdkafka_has_is_left_out_for_the_jvm() -> None:
    """Queue sizes and statistics do not affect what is read."""
    assert jvm({**SERVERS, "queued.max.messages.kbytes": "1", "statistics.interval.ms": "5"}) == SERVERS


def test_names_are_not_checked_where_librdkafka_says_so() -> None:
    """librdkafka calls this ``none``, while the JVM expects an empty string: it would take ``none`` for an unknown algorithm."""
    assert jvm({**SERVERS, "ssl.endpoint.identification.algorithm": "none"})["ssl.endpoint.identification.algorithm"] == ""


@pytest.mark.parametrize("name", ["ssl.keystore.password", "sasl.oauthbearer.client.secret"])
def test_a_security_setting_that_the_jvm_has_not_is_refused_without_its_value(name: str) -> None:
    """Without it, the client would connect differently than requested. Its value may be a secret."""
    with pytest.raises(BadInput, match=name.replace(".", r"\.")) as raised:
        jvm({**SERVERS, name: SECRET})
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "setting", [{"no.such.setting": "1"}, {"security.protocol": "ssl", "ssl.ca.location": "/no/such/file"}], ids=["unknown", "missing file"]
)
def test_setting_that_the_client_cannot_use_is_refused_as_bad_input(setting: dict[str, str]) -> None:
    """It fails until someone corrects it, so it must not be retried like an outage."""
    cluster = Cluster({"bootstrap.servers": "127.0.0.1:1", **setting})
    with pytest.raises(BadInput, match="Kafka settings"):
        cluster.matching("x")
