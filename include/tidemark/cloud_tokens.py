"""Tokens from the clouds' own libraries, for settings that name them: ``aws-msk-iam``, ``google``, ``azure``, and ``aws-rds`` for Postgres.

Each function has the interface of a user's (`tidemark.tokens`) and takes the identity of the process: a role of the instance, the pod or
the environment. The libraries are the user's to install.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
from collections.abc import Mapping
from datetime import UTC
from typing import Any

from tidemark.errors import BadInput
from tidemark.tokens import now_s

LIFETIME_S = 900
"""How long AWS accepts a token for a login to RDS."""


def aws_msk_iam(about: Mapping[str, str]) -> tuple[str, float]:
    """A token for Amazon MSK with IAM."""
    provider = _library("aws_msk_iam_sasl_signer.MSKAuthTokenProvider", "aws-msk-iam-sasl-signer-python")
    token, expires_at_ms = provider.generate_auth_token(_region(about))
    return token, expires_at_ms / 1000 - now_s()


def aws_rds(about: Mapping[str, str]) -> tuple[str, float]:
    """A password for Amazon RDS and Aurora with IAM."""
    client = _library("boto3", "boto3").client("rds", region_name=_region(about))
    return client.generate_db_auth_token(about["host"], int(about["port"]), about["user"]), LIFETIME_S


def google(_about: Mapping[str, str]) -> tuple[str, float, str]:
    """A token for Google's Managed Service for Apache Kafka: the access token in the form of a JWT that the service defines."""
    auth, transport = _library("google.auth", "google-auth[requests]"), _library("google.auth.transport.requests", "google-auth[requests]")
    credentials, _ = auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    credentials.refresh(transport.Request())
    now, who = now_s(), getattr(credentials, "service_account_email", "")
    expires_at = credentials.expiry.replace(tzinfo=UTC).timestamp()
    header = {"typ": "JWT", "alg": "GOOG_OAUTH2_TOKEN"}
    claims = {"exp": expires_at, "iat": now, "iss": "Google", "scope": "kafka", "sub": who}
    parts = (json.dumps(header), json.dumps(claims), credentials.token)
    return ".".join(base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts), expires_at - now, who


def azure(about: Mapping[str, str]) -> tuple[str, float]:
    """A token for Azure Event Hubs."""
    credential = _library("azure.identity", "azure-identity").DefaultAzureCredential()
    host = about["bootstrap.servers"].split(",")[0].strip().rpartition("://")[2].rpartition(":")[0]
    token = credential.get_token(about.get("tidemark.token.scope") or f"https://{host}/.default")
    return token.token, token.expires_on - now_s()


def _region(about: Mapping[str, str]) -> str:
    region = about.get("tidemark.token.region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region:
        fix = "Set tidemark.token.region among the Kafka settings, or the variable AWS_REGION."
        raise BadInput(what="AWS region", found="it is not set", fix=fix)
    return region


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        fix = f"Install it on every host that connects: pip install '{package}'."
        raise BadInput(what=package, found=f"it is not installed (no module {error.name})", fix=fix) from None
