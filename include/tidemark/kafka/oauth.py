"""The settings that say where Kafka's tokens come from (SASL OAUTHBEARER), and what each client makes of them.

``tidemark.token`` names a function or a cloud, ``tidemark.token.command`` a command; other names below ``tidemark.token.`` are the
function's own. ``kafka.sasl.*`` is for Spark's connector alone. librdkafka gets none of them: `librdkafka` removes them, and
`tidemark.kafka.config.connected` and `tidemark.kafka.compiled` add the callback that hands tokens over. librdkafka's own methods
(``sasl.oauthbearer.method=oidc``) stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tidemark.errors import BadInput, TidemarkError
from tidemark.kafka.security import bad_setting
from tidemark.tokens import Token, TokenSource

log = logging.getLogger(__name__)

OURS = "tidemark."
FUNCTION = "tidemark.token"
COMMAND = "tidemark.token.command"
JVM = "kafka.sasl."
"""Prefix of settings for Spark's connector alone, with the prefix that Spark gives them."""
JVM_CALLBACK = "kafka.sasl.login.callback.handler.class"
MECHANISM = "OAUTHBEARER"
CLOUDS = {
    "aws-msk-iam": "tidemark.cloud_tokens:aws_msk_iam",
    "azure": "tidemark.cloud_tokens:azure",
    "google": "tidemark.cloud_tokens:google",
}
"""Functions that have a name of their own."""
_FIX = f"Set {FUNCTION} (module:function, {', '.join(CLOUDS)}) or {COMMAND}, or librdkafka's sasl.oauthbearer.method=oidc."


def source_of(settings: Mapping[str, str]) -> TokenSource | None:
    """Where these settings take tokens from. `None` if they name nothing."""
    if command := settings.get(COMMAND):
        return TokenSource(setting=COMMAND, command=command, must_expire=True)
    if name := settings.get(FUNCTION):
        about = {key: value for key, value in settings.items() if key == "bootstrap.servers" or key.startswith(OURS)}
        return TokenSource(setting=FUNCTION, function=CLOUDS.get(name, name), about=tuple(sorted(about.items())), must_expire=True)
    return None


def librdkafka(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings that librdkafka knows."""
    return {name: value for name, value in settings.items() if not name.startswith((OURS, JVM))}


def for_jvm(settings: Mapping[str, str]) -> dict[str, str]:
    """What the settings give to Spark's connector alone. Raises `BadInput` if tokens come from Python, which the JVM cannot ask."""
    if source_of(settings) is not None and JVM_CALLBACK not in settings:
        raise BadInput(
            what=FUNCTION if FUNCTION in settings else COMMAND,
            found="Spark's connector, which reads for transforms in the Spark form, cannot call Python or a command",
            fix=f"Set {JVM_CALLBACK} to a class of a jar in spark.jars, or write the transform in the Arrow form.",
        )
    return {name.removeprefix("kafka."): value for name, value in settings.items() if name.startswith(JVM)}


def check(settings: Mapping[str, str]) -> None:
    """Raises `BadInput` if the settings contradict each other, or name nothing from which tokens come."""
    unknown = sorted(
        name
        for name in settings
        if (name.startswith(OURS) and not (name == FUNCTION or name.startswith(f"{FUNCTION}.")))
        or (name.startswith("kafka.") and not name.startswith(JVM))
    )
    if unknown:
        raise bad_setting(unknown[0], "Tidemark does not know it", f"Names here are {FUNCTION}, {COMMAND}, {JVM}* and librdkafka's.")
    own = sorted(name for name in settings if name.startswith(f"{FUNCTION}.") and name != COMMAND)
    if FUNCTION in settings and COMMAND in settings:
        raise bad_setting(COMMAND, f"{FUNCTION} is set too", "Remove one of them.")
    if own and FUNCTION not in settings:
        raise bad_setting(own[0], f"it is for the function of {FUNCTION}, which is not set", _FIX)
    named = FUNCTION in settings or COMMAND in settings
    if named and source_of(settings) is None:
        raise bad_setting(FUNCTION if FUNCTION in settings else COMMAND, "it is empty", _FIX)
    mechanism = settings.get("sasl.mechanism") or settings.get("sasl.mechanisms") or ""
    own_method = settings.get("sasl.oauthbearer.method", "").lower() == "oidc"
    unsecured = settings.get("enable.sasl.oauthbearer.unsecure.jwt", "").lower() in ("true", "t", "1")
    if mechanism.upper() != MECHANISM:
        if named:
            raise bad_setting("sasl.mechanism", f"it is {mechanism or 'not set'}, but tokens need {MECHANISM}", f"Set it to {MECHANISM}.")
        return
    if named and (own_method or unsecured):
        name = "sasl.oauthbearer.method" if own_method else "enable.sasl.oauthbearer.unsecure.jwt"
        raise bad_setting(name, "with it, librdkafka makes its own tokens", f"Remove it, or {FUNCTION} and {COMMAND}.")
    if named and not settings.get("security.protocol", "").upper().startswith("SASL"):
        protocol = settings.get("security.protocol", "not set")
        raise bad_setting("security.protocol", f"it is {protocol}, so no token would be sent", "Set it to SASL_SSL.")
    if not (named or own_method or unsecured):
        raise bad_setting("sasl.mechanism", f"it is {MECHANISM}, but no setting says where tokens come from", _FIX)


def renewed(source: TokenSource) -> Token:
    """A token for librdkafka's callback. Logs an error: librdkafka asks again after 10 s, and a client with a valid token works on."""
    try:
        return source.token()
    except TidemarkError as error:
        log.warning("token not renewed cause=%s", error)
        raise
