"""Translates TLS and SASL settings between librdkafka, whose names Tidemark uses, and the JVM's client, which Spark's connector uses.

| librdkafka | the JVM's client |
|---|---|
| ``sasl.username``, ``sasl.password`` | ``sasl.jaas.config`` with PlainLoginModule or ScramLoginModule |
| ``ssl.ca.location`` | ``ssl.truststore.location``, type PEM |
| ``ssl.ca.pem`` | ``ssl.truststore.certificates``, type PEM |
| ``ssl.certificate.location`` and ``ssl.key.location``, one file | ``ssl.keystore.location``, type PEM |
| ``ssl.certificate.pem``, ``ssl.key.pem`` | ``ssl.keystore.certificate.chain``, ``ssl.keystore.key``, type PEM |
| ``ssl.keystore.location``, ``ssl.keystore.password`` | the same, type PKCS12 |
| ``ssl.endpoint.identification.algorithm=none`` | the same, empty |

Both directions are exact or refused, because omitting a security setting would change how the client connects. No error shows a value that
may be secret. The functions are pure and read no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tidemark.errors import BadInput

SAME = frozenset({"sasl.kerberos.service.name", "ssl.key.password"})
"""Settings with the same name and meaning in both clients."""

JVM_ONLY = frozenset(
    {
        "sasl.client.callback.handler.class",
        "sasl.login.callback.handler.class",
        "sasl.login.class",
        "ssl.enabled.protocols",
        "ssl.engine.factory.class",
        "ssl.keymanager.algorithm",
        "ssl.protocol",
        "ssl.provider",
        "ssl.secure.random.implementation",
        "ssl.trustmanager.algorithm",
        "ssl.truststore.password",
    }
)
"""Settings of the JVM's client that librdkafka does not have."""

_MODULES = {
    "org.apache.kafka.common.security.plain.PlainLoginModule": ("PLAIN",),
    "org.apache.kafka.common.security.scram.ScramLoginModule": ("SCRAM-SHA-256", "SCRAM-SHA-512"),
}
_VALUE = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s;"'=]+)"""
_OPTION = re.compile(rf"\s+([\w.]+)\s*=\s*({_VALUE})", re.DOTALL)
_JAAS = re.compile(rf"\s*([\w.$]+)\s+(\w+)((?:{_OPTION.pattern})*)\s*;\s*", re.DOTALL)
_ESCAPED = re.compile(r"\\([0-3][0-7]{0,2}|[4-7][0-7]?|.)", re.DOTALL)
_LETTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_NAMES = "Use sasl.username, sasl.password, ssl.ca.location, ssl.certificate.location and ssl.key.location."


def to_librdkafka(settings: Mapping[str, str]) -> dict[str, str]:
    """Returns ``settings`` with the JVM's names replaced by librdkafka's. Other settings stay unchanged.

    Raises `BadInput` for a JVM setting without an exact equivalent in librdkafka, and if both names are used with different values.
    """
    remaining = dict(settings)
    translated: dict[str, str] = {}
    if unsupported := sorted(JVM_ONLY.intersection(remaining)):
        raise bad_setting(unsupported[0], "librdkafka, which reads offsets and records, does not have this setting", _NAMES)
    if "sasl.jaas.config" in remaining:
        translated |= _login(remaining.pop("sasl.jaas.config"), remaining.get("sasl.mechanism") or remaining.get("sasl.mechanisms"))
    translated |= _trust(remaining) | _keys(remaining)
    if remaining.get("ssl.endpoint.identification.algorithm") == "":
        remaining["ssl.endpoint.identification.algorithm"] = "none"
    if len({remaining[name] for name in ("sasl.mechanism", "sasl.mechanisms") if name in remaining}) > 1:
        raise bad_setting("sasl.mechanism", "sasl.mechanisms, its other name, has a different value", "Remove one of them.")
    for name, value in translated.items():
        if remaining.get(name, value) != value:
            raise bad_setting(name, "the JVM's name for it is set too, with a different value", "Remove one of them.")
    return remaining | translated


def to_jvm(config: Mapping[str, str]) -> dict[str, str]:
    """Returns the security settings of ``config`` under the names of the JVM's client.

    Raises `BadInput` for a setting without a counterpart.
    """
    result = {name: value for name, value in config.items() if name in SAME}
    used = set(SAME)
    if "security.protocol" in config:
        result["security.protocol"] = config["security.protocol"].upper()
    if (algorithm := config.get("ssl.endpoint.identification.algorithm")) is not None:
        result["ssl.endpoint.identification.algorithm"] = "" if algorithm.lower() == "none" else algorithm
    if config.get("enable.ssl.certificate.verification", "true").lower() not in ("true", "t", "1"):
        raise bad_setting(
            "enable.ssl.certificate.verification",
            "the JVM's client, which reads for Spark-form transforms, cannot skip the verification of certificates",
            "Set ssl.ca.location to the CA's certificate.",
        )
    if mechanism := config.get("sasl.mechanism") or config.get("sasl.mechanisms"):
        result["sasl.mechanism"] = mechanism
    used |= {"ssl.endpoint.identification.algorithm", "sasl.mechanism", "sasl.mechanisms"}
    for part in (_jaas(config, mechanism), _truststore(config), _keystore(config)):
        used |= part.keys()
        result |= {name: value for settings in part.values() for name, value in settings.items()}
    if unsupported := sorted(name for name in config if name.startswith(("ssl.", "sasl.")) and name not in used):
        raise bad_setting(
            unsupported[0],
            "Spark's connector does not have this setting",
            "Use ssl.ca.location, sasl.mechanism, sasl.username and sasl.password, or write the transform in the Arrow form.",
        )
    return result


def quoted(text: str) -> str:
    """``text`` quoted as a value in a JAAS line."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


# ---- from the JVM's names


def _login(jaas: str, mechanism: str | None) -> dict[str, str]:
    """The user and password of a JAAS line with one login module."""
    name = "sasl.jaas.config"
    fix = 'Write one login module, `... required username="..." password="...";`, or sasl.username and sasl.password.'
    match = _JAAS.fullmatch(jaas)
    if match is None:
        raise bad_setting(name, "it is not one login module with options (its text is not shown here)", fix)
    module, options = match[1], {key: _unquoted(value) for key, value in _OPTION.findall(match[3])}
    if module not in _MODULES:
        raise bad_setting(name, f"its login module is {module}, which has no counterpart in librdkafka", fix)
    if mechanism not in _MODULES[module]:
        problem = f"its login module is {module}, but sasl.mechanism is {mechanism or 'missing'}"
        raise bad_setting(name, problem, f"Set sasl.mechanism to {' or '.join(_MODULES[module])}.")
    unsupported = sorted(options.keys() - {"username", "password"})
    if unsupported or len(options) != 2:
        raise bad_setting(
            name, f"its option {unsupported[0]} has no counterpart" if unsupported else "username or password is missing", fix
        )
    return {"sasl.username": options["username"], "sasl.password": options["password"]}


def _unquoted(value: str) -> str:
    """Unquotes a JAAS value like the JVM's tokenizer."""
    if value[0] not in "\"'":
        return value
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)) if match[1][0] in "01234567" else _LETTERS.get(match[1], match[1]), value[1:-1])


def _trust(settings: dict[str, str]) -> dict[str, str]:
    """Removes the JVM's truststore from ``settings`` and returns it under librdkafka's names."""
    kind = settings.pop("ssl.truststore.type", None)
    translated = {
        ours: settings.pop(theirs)
        for theirs, ours in (("ssl.truststore.location", "ssl.ca.location"), ("ssl.truststore.certificates", "ssl.ca.pem"))
        if theirs in settings
    }
    if translated and (kind or "JKS").upper() != "PEM":
        raise bad_setting(
            "ssl.truststore.type",
            f"it is {kind or 'missing, which means JKS'}, but librdkafka reads certificates only as PEM",
            "Export the CA's certificate with keytool -exportcert -rfc, set ssl.truststore.type to PEM and "
            "ssl.truststore.location to that file (or ssl.ca.location alone).",
        )
    return translated


def _keys(settings: dict[str, str]) -> dict[str, str]:
    """Removes the JVM's key store from ``settings`` and returns it under librdkafka's names.

    Without a type, ``ssl.keystore.location`` is librdkafka's own setting: PKCS12.
    """
    kind = (settings.pop("ssl.keystore.type", None) or "").upper()
    if kind not in ("", "PEM", "PKCS12"):
        raise bad_setting("ssl.keystore.type", f"it is {kind}, which librdkafka cannot read", "Convert the key store to PKCS12 or PEM.")
    texts = {"ssl.keystore.certificate.chain": "ssl.certificate.pem", "ssl.keystore.key": "ssl.key.pem"}
    present = sorted(texts.keys() & settings.keys())
    if kind != "PEM":
        if present:
            raise bad_setting("ssl.keystore.type", f"{present[0]} is given, but the type is not PEM", "Set ssl.keystore.type to PEM.")
        return {}
    translated = {texts[name]: settings.pop(name) for name in present}
    if "ssl.keystore.password" in settings:
        raise bad_setting("ssl.keystore.password", "a PEM file has no key store password", "Set the key's password in ssl.key.password.")
    if "ssl.keystore.location" in settings:
        file = settings.pop("ssl.keystore.location")
        translated |= {"ssl.certificate.location": file, "ssl.key.location": file}
    return translated


# ---- to the JVM's names: the JVM's settings by the librdkafka setting that they replace


def _jaas(config: Mapping[str, str], mechanism: str | None) -> dict[str, dict[str, str]]:
    if not any(name in config for name in ("sasl.username", "sasl.password")):
        return {}
    module = next((module for module, mechanisms in _MODULES.items() if mechanism in mechanisms), None)
    if module is None:
        raise bad_setting(
            "sasl.mechanism",
            f"it is {mechanism or 'missing, which means GSSAPI'}, which takes no sasl.username",
            "Set it to PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512.",
        )
    user, password = quoted(config.get("sasl.username", "")), quoted(config.get("sasl.password", ""))
    jaas = {"sasl.jaas.config": f"{module} required username={user} password={password};"}
    return {"sasl.username": jaas, "sasl.password": jaas}


def _truststore(config: Mapping[str, str]) -> dict[str, dict[str, str]]:
    if config.get("ssl.ca.location") == "probe":
        raise bad_setting("ssl.ca.location", "it is probe, which only librdkafka supports", "Set it to the file with the CA's certificate.")
    translated: dict[str, dict[str, str]] = {}
    for ours, theirs in (("ssl.ca.location", "ssl.truststore.location"), ("ssl.ca.pem", "ssl.truststore.certificates")):
        if ours in config:
            translated[ours] = {"ssl.truststore.type": "PEM", theirs: config[ours]}
    if len(translated) > 1:
        raise bad_setting("ssl.ca.pem", "ssl.ca.location is set too, but the JVM's client takes only one of them", "Remove one of them.")
    return translated


def _keystore(config: Mapping[str, str]) -> dict[str, dict[str, str]]:
    translated: dict[str, dict[str, str]] = {}
    if "ssl.keystore.location" in config:
        for name in ("ssl.keystore.location", "ssl.keystore.password"):
            if name in config:
                translated[name] = {"ssl.keystore.type": "PKCS12", name: config[name]}
    files = [config[name] for name in ("ssl.certificate.location", "ssl.key.location") if name in config]
    if files and (len(files) != 2 or files[0] != files[1]):
        raise bad_setting(
            "ssl.key.location",
            "it differs from ssl.certificate.location, but the JVM's client reads certificate and key from one file",
            "Put both into one PEM file (key in PKCS#8) and set both to it, or write the transform in the Arrow form.",
        )
    if files:
        pem = {"ssl.keystore.type": "PEM", "ssl.keystore.location": files[0]}
        translated |= {"ssl.certificate.location": pem, "ssl.key.location": pem}
    for ours, theirs in (("ssl.certificate.pem", "ssl.keystore.certificate.chain"), ("ssl.key.pem", "ssl.keystore.key")):
        if ours in config:
            translated[ours] = {"ssl.keystore.type": "PEM", theirs: config[ours]}
    return translated


def bad_setting(name: str, problem: str, fix: str) -> BadInput:
    """The error for a setting that no client can follow. ``problem`` does not quote what may be secret."""
    return BadInput(what=f"Kafka setting {name}", found=problem, fix=fix)
