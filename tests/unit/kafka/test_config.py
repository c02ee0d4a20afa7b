"""One set of Kafka settings for two clients: nothing is lost in translation, and users cannot change what Tidemark decides."""

from __future__ import annotations

import pytest

from tidemark.errors import BadInput
from tidemark.kafka.cluster import Cluster, Setting, SettingUnknown, TopicSettings, in_sync_replicas
from tidemark.kafka.config import OURS, checked, jvm
from tidemark.kafka.producer import Publisher
from tidemark.kafka.reader import SETTINGS

SERVERS = {"bootstrap.servers": "a:9092,b:9092"}
SECRET = "s3cr3t"


def test_settings_become_text_as_librdkafka_reads_it() -> None:
    """An Airflow connection's extra is JSON, so it may contain numbers, booleans and nulls. Its form asks for a group id, which is dropped:
    the spec names the group, and Tidemark never joins a group of Kafka's."""
    given_settings = {"enable.ssl.certificate.verification": True, "request.timeout.ms": 3000, "client.rack": None, "group.id": "airflow"}
    assert checked(SERVERS | given_settings) == {**SERVERS, "enable.ssl.certificate.verification": "true", "request.timeout.ms": "3000"}


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
    assert name in SETTINGS, "or the reader leaves it to librdkafka's default"


def test_the_jvm_gets_the_settings_that_it_knows_by_the_same_name() -> None:
    """Queue sizes and statistics do not affect what is read. For security settings, see tests/unit/kafka/test_security.py."""
    known = {"client.id": "a", "client.rack": "b", "request.timeout.ms": "3000", "metadata.max.age.ms": "1", "security.protocol": "SSL"}
    assert jvm({**SERVERS, **known, "queued.max.messages.kbytes": "1", "statistics.interval.ms": "5"}) == SERVERS | known


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


def test_a_chosen_compression_is_kept() -> None:
    """A broker may take only some: Event Hubs, for example, takes gzip."""
    assert Publisher(SERVERS)._settings["compression.type"] == "lz4"
    for alone in (False, True):
        chosen = Publisher({**SERVERS, "compression.codec": "gzip"}, alone=alone)._settings
        assert (chosen["compression.codec"], "compression.type" in chosen) == ("gzip", False)


def test_a_setting_that_the_broker_does_not_report_is_named_where_it_is_needed() -> None:
    settings = TopicSettings({"retention.ms": Setting("1", False)})
    assert in_sync_replicas(settings) == 1
    with pytest.raises(SettingUnknown, match=r"The broker does not report cleanup\.policy of topics"):
        settings["cleanup.policy"]
