"""Tokens that live for minutes, in place of passwords: from a command or a Python function that each process asks itself.

    setting ──▶ TokenSource ──▶ token, kept while it is fresh ──▶ Kafka's SASL OAUTHBEARER, or Postgres' password

Only the setting travels, to drivers and to executors; a token never leaves the process that asked for it. So a function must be importable,
and a command installed, wherever Tidemark connects. No error shows a token.
"""

from __future__ import annotations

import base64
import binascii
import functools
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard

from tidemark import project
from tidemark.errors import BadInput, TidemarkError, Unavailable, message_of

COMMAND_LIMIT_S = 30
"""How long a command may take."""
FRESH = 0.25
"""A token is used again while more than this share of its lifetime remains. librdkafka asks for the next one after four fifths."""
TEXT_CHARACTERS = 200

_SECRETS = re.compile(
    r"eyJ[\w.-]+"  # a JWT
    r"|(?<=://)[^/\s@]*(?=@)"
    r"|(?i:(?<=password)|(?<=passwd)|(?<=secret)|(?<=token)|(?<=key)|(?<=signature))[\"']?\s*[=:]\s*\S+"
    r"|[\w+-]{32,}=*"
)
_PRINTS = 'Print JSON, {"token": "...", "lifetime": 900, "principal": "..."} with the lifetime in seconds, or a JWT.'
_RETURNS = "Return (token, lifetime in seconds, principal), or a JWT."
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def now_s() -> float:
    """Seconds since 1970, by which tokens say when they expire."""
    return time.time()


class TokenUnavailable(Unavailable):
    """A command or a function gave no usable token; it may next time."""

    setting: str
    cause: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.cause}. Nothing was connected."


class Token(NamedTuple):
    """``expires_at``: seconds since 1970; `None` if unknown, and then the next connection asks again."""

    value: str
    expires_at: float | None = None
    principal: str = ""


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Where tokens come from. Exactly one of ``command`` and ``function`` is set.

    ``setting`` names it in messages. ``about``: facts of the connection, with which the function is called. ``must_expire``: refuses a
    token without a known lifetime.
    """

    setting: str
    command: str = ""
    function: str = ""
    about: tuple[tuple[str, str], ...] = ()
    must_expire: bool = False

    def token(self) -> Token:
        """A token that is fresh: the last one of this process, or a new one. Threads may share it.

        Raises `TokenUnavailable`, and `BadInput` for a command or a function that cannot work.
        """
        kept = _kept(self)
        with kept.lock:
            if kept.token is None or kept.fresh_until <= now_s():
                kept.token = token = self._ask()
                now = now_s()
                kept.fresh_until = now if token.expires_at is None else token.expires_at - FRESH * (token.expires_at - now)
            return kept.token

    def renewed(self) -> Token:
        """A new token: the server may no longer take the last one."""
        kept = _kept(self)
        with kept.lock:
            kept.token = None
        return self.token()

    def _ask(self) -> Token:
        token = _printed(self.setting, self.command) if self.command else _returned(self.setting, self.function, dict(self.about))
        if not token.value or _CONTROL.search(token.value):
            raise self._unusable("its token is empty" if not token.value else "its token has control characters")
        if token.expires_at is None and self.must_expire:
            raise self._unusable("its token has no lifetime and is no JWT with exp")
        if token.expires_at is not None and (ago_s := now_s() - token.expires_at) >= 0:
            raise TokenUnavailable(setting=self.setting, cause=f"its token expired {ago_s:.0f} s ago; this host's clock may be wrong")
        return token

    def _unusable(self, problem: str) -> BadInput:
        return BadInput(what=self.setting, found=problem, fix=_PRINTS if self.command else _RETURNS)


@dataclass(slots=True)
class _Kept:
    lock: threading.Lock = field(default_factory=threading.Lock)
    token: Token | None = field(default=None, repr=False)
    fresh_until: float = 0.0


@functools.cache
def _kept(_source: TokenSource) -> _Kept:
    return _Kept()


def _in_memory(name: str) -> IO[bytes]:
    """A file that is on no disk. Unlike a pipe, it can be read when a command has ended, although processes that it has started still hold
    it open."""
    return os.fdopen(os.memfd_create(name), "w+b")


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _printed(setting: str, command: str) -> Token:
    """The token that a command prints. It runs without a shell."""
    fix = "Write a program and its arguments, as in a shell but without pipes and variables."
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadInput(what=setting, found=f"it cannot be split into words ({error})", fix=fix) from None
    if not words:
        raise BadInput(what=setting, found="it is empty", fix=fix)
    name = Path(words[0]).name
    try:
        with _in_memory("token") as output, _in_memory("reason") as reason:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=output, stderr=reason, timeout=COMMAND_LIMIT_S, check=False)
            printed, messages = (_text_of(each).strip() for each in (output, reason))
    except subprocess.TimeoutExpired:
        raise TokenUnavailable(setting=setting, cause=f"{name} was killed, it did not end within {COMMAND_LIMIT_S:g} s") from None
    except OSError as error:
        raise BadInput(what=setting, found=f"{words[0]} cannot be started ({error.strerror})", fix=fix) from None
    if done.returncode != 0:
        last = (messages.splitlines() or ["it wrote no reason"])[-1]
        for word in printed.split():
            last = last.replace(word, "***")
        raise TokenUnavailable(setting=setting, cause=f"{name} ended with status {done.returncode}: {_without_secrets(last)}")
    if not printed:
        raise BadInput(what=setting, found=f"{name} printed nothing", fix=_PRINTS)
    if not printed.startswith("{"):
        return _of_text(printed)
    try:
        values = json.loads(printed)
    except ValueError:
        raise BadInput(what=setting, found=f"{name} printed an object that is not JSON", fix=_PRINTS) from None
    value, lifetime, principal = (values.get(key) for key in ("token", "lifetime", "principal"))
    problem = _problem(value, lifetime, principal)
    if problem:
        raise BadInput(what=setting, found=f"{name} printed {problem}", fix=_PRINTS)
    return _of_parts(value, lifetime, principal)


def _returned(setting: str, name: str, about: Mapping[str, str]) -> Token:
    """The token that a function returns for a connection."""
    function = _imported(setting, name)
    try:
        result = function(about)
    except TidemarkError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        cause = f"{name} raised {type(error).__name__}: {_without_secrets(message_of(error))}"
        raise TokenUnavailable(setting=setting, cause=cause) from None
    if isinstance(result, str):
        return _of_text(result)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise BadInput(what=setting, found=f"{name} returned {type(result).__name__}", fix=_RETURNS)
    value, lifetime, principal = (*result, None)[:3]
    if problem := _problem(value, lifetime, principal):
        raise BadInput(what=setting, found=f"{name} returned {problem}", fix=_RETURNS)
    return _of_parts(value, lifetime, principal)


def _problem(value: object, lifetime: object, principal: object) -> str:
    if not isinstance(value, str):
        return f"a token that is {'missing' if value is None else type(value).__name__}"
    if lifetime is not None and not _is_number(lifetime):
        return f"a lifetime that is {type(lifetime).__name__}, not a number of seconds"
    if principal is not None and not isinstance(principal, str):
        return f"a principal that is {type(principal).__name__}"
    return ""


def _of_parts(value: str, lifetime: float | None, principal: str | None) -> Token:
    """A token with what it says itself where nothing else is given."""
    own = _of_text(value)
    return Token(value, own.expires_at if lifetime is None else now_s() + lifetime, own.principal if principal is None else principal)


def _of_text(text: str) -> Token:
    """A token with the ``exp`` and ``sub`` of a JWT. Its signature is the server's business."""
    parts = text.split(".")
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))) if len(parts) == 3 else None
    except (ValueError, binascii.Error):
        claims = None
    if not isinstance(claims, dict):
        return Token(text)
    expires_at, subject = claims.get("exp"), claims.get("sub")
    return Token(text, float(expires_at) if _is_number(expires_at) else None, subject if isinstance(subject, str) else "")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _imported(setting: str, name: str) -> Callable[[Mapping[str, str]], Any]:
    """A function by ``module:function``, from the project's transforms or from an installed package."""
    module_name, _, function_name = name.partition(":")
    fix = f"Write module:function, with the module in {project.transforms()} or installed, on every host that connects."
    if not module_name or not function_name:
        raise BadInput(what=setting, found=f"{name!r} is not module:function", fix=fix)
    folder = project.transforms()
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BadInput(what=setting, found=f"there is no module {error.name}, which {name} needs", fix=fix) from None
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        found = f"importing {module_name} raised {type(error).__name__}: {_without_secrets(message_of(error))}"
        raise BadInput(what=setting, found=found, fix=fix) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise BadInput(what=setting, found=f"module {module_name} has no function {function_name}", fix=fix)
    typed: Callable[[Mapping[str, str]], Any] = function
    return typed


def _without_secrets(text: str) -> str:
    """The first line of a foreign text, without what may be a secret."""
    return _SECRETS.sub("***", (text.splitlines() or [""])[0])[:TEXT_CHARACTERS].rstrip(". ")
