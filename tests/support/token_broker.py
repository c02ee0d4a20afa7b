"""A broker that demands tokens, and the function and the command that make them.

The second listener takes SASL OAUTHBEARER with Kafka's validator of unsecured JWTs, and ends each connection when its token expires unless
the client logs in again. The first one, the product's own, is for the test itself. The third one sends its clients to a closed port.
"""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidemark.local import ports
from tidemark.local.kafka import Kafka
from tidemark.local.stack import LocalStack

PACKAGE = "org.apache.kafka.common.security.oauthbearer"
JVM_CALLBACK = f"{PACKAGE}.internals.unsecured.OAuthBearerUnsecuredLoginCallbackHandler"
JAAS = f'{PACKAGE}.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="jvm";'
CLOSED = f"{ports.HOST}:1"
"""An address that accepts no connection."""
MODULE = """
    import base64
    import json
    import os
    import sys
    import time
    from pathlib import Path

    LIFETIME_S = {lifetime_s}


    def part(claims):
        return base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")


    def jwt(lifetime_s=LIFETIME_S):
        token = part({{"alg": "none"}}) + "." + part({{"sub": "loader", "iat": time.time() - 1, "exp": time.time() + lifetime_s}}) + "."
        with Path({log!r}).open("a") as file:
            file.write(f"{{os.getpid()}} {{token}}\\n")
        return token


    def token(settings):
        assert settings["bootstrap.servers"]
        return jwt(), LIFETIME_S, "loader"


    if __name__ == "__main__":
        print(jwt())
"""
"""Makes tokens, and writes down each one with the process that asked."""


class TokenKafka(Kafka):
    """The product's broker with a listener for tokens, and one that advertises `CLOSED`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None)
        self.token_port = ports.find_free()
        self.misleading_port = ports.find_free(exclude={self.token_port})

    def settings(self, port: int, controller_port: int) -> dict[str, str]:
        while self.token_port in {port, controller_port, self.misleading_port}:  # chosen later, before the first start
            self.token_port = ports.find_free()
        while self.misleading_port in {port, controller_port, self.token_port}:
            self.misleading_port = ports.find_free()
        lines = super().settings(port, controller_port)
        for setting in ("listeners", "advertised.listeners"):
            lines[setting] += f",SASL_PLAINTEXT://{ports.HOST}:{self.token_port}"
        lines["listeners"] += f",MISLEADING://{ports.HOST}:{self.misleading_port}"
        lines["advertised.listeners"] += f",MISLEADING://{CLOSED}"
        lines["listener.security.protocol.map"] += ",SASL_PLAINTEXT:SASL_PLAINTEXT,MISLEADING:PLAINTEXT"
        listener = "listener.name.sasl_plaintext.oauthbearer."
        return lines | {
            "inter.broker.listener.name": "PLAINTEXT",
            "sasl.enabled.mechanisms": "OAUTHBEARER",
            f"{listener}sasl.jaas.config": f'{PACKAGE}.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";',
            f"{listener}sasl.server.callback.handler.class": f"{PACKAGE}.internals.unsecured.OAuthBearerUnsecuredValidatorCallbackHandler",
            f"{listener}connections.max.reauth.ms": "3600000",
        }


@contextmanager
def token_broker() -> Iterator[TokenKafka]:
    with tempfile.TemporaryDirectory(prefix="tidemark-tokens-") as name:
        stack = LocalStack(Path(name))
        broker = TokenKafka(stack.folder / "kafka")
        stack.kafka = broker
        stack.start(broker)
        try:
            yield broker
        finally:
            stack.stop(broker)


@dataclass(frozen=True)
class TokenMaker:
    """The user's module, and what it has handed out."""

    module: Path
    log: Path

    @classmethod
    def write(cls, folder: Path, name: str, lifetime_s: float) -> TokenMaker:
        maker = cls(folder / f"{name}.py", folder.parent / f"{name}.log")
        maker.module.write_text(textwrap.dedent(MODULE.format(lifetime_s=lifetime_s, log=str(maker.log))).lstrip())
        return maker

    def tokens(self) -> dict[str, list[str]]:
        """The tokens by the process that asked."""
        found: dict[str, list[str]] = {}
        for line in self.log.read_text().splitlines() if self.log.exists() else ():
            process, token = line.split()
            found.setdefault(process, []).append(token)
        return found
