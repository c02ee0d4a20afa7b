"""Tokens come from a command or a function, are kept while they are fresh, and every mistake has one clear error without a secret."""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemark import cloud_tokens, tokens
from tidemark.errors import BadInput, TidemarkError
from tidemark.tokens import Token, TokenSource, TokenUnavailable

SECRET = "s3cr3t-" + "x" * 40
Module = Callable[[str], str]


def jwt(**claims: object) -> str:
    parts = ({"alg": "none"}, claims)
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + ".c2ln"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """Writes a module into the project's folder of transforms, and returns its name."""
    monkeypatch.setenv("TIDEMARK_TRANSFORMS", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = []

    def write(source: str) -> str:
        name = f"made_{tmp_path.name}_{len(names)}".replace("-", "_")
        names.append(name)
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def from_command(code: str, setting: str = "the setting") -> TokenSource:
    """A command that runs this Python code. Each test's source is its own, because a process keeps fresh tokens."""
    return TokenSource(setting=setting, command=f'{sys.executable} -c "{code}"', must_expire=True, about=(("at", str(time.time_ns())),))


def test_command_prints_json_or_a_jwt(tmp_path: Path) -> None:
    """A JWT says itself when it expires, and for whom it is. What JSON says counts more."""
    moment = int(time.time()) + 600
    token = jwt(exp=moment, sub="loader")
    assert from_command(f"print('{token}')").token() == Token(token, moment, "loader")
    (tmp_path / "token.json").write_text(json.dumps({"token": token, "lifetime": 60, "principal": "other"}))
    printed = TokenSource(setting="x", command=f"cat '{tmp_path}/token.json'").token()
    assert (printed.value, printed.principal) == (token, "other")
    assert printed.expires_at == pytest.approx(time.time() + 60, abs=10)


def test_function_is_called_with_the_facts_of_its_connection(module: Module) -> None:
    """It is found in the project's folder of transforms. It returns the token with its lifetime, and a principal if it knows one."""
    name = module("def make(about): return about['user'] + '!', 60, 'me'\ndef short(about): return 'y', 60.5")
    token = TokenSource(setting="x", function=f"{name}:make", about=(("user", "loader"),)).token()
    assert (token.value, token.principal) == ("loader!", "me")
    assert TokenSource(setting="x", function=f"{name}:short").token().value == "y"


def test_token_is_kept_while_more_than_a_quarter_of_its_lifetime_remains(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the next one is asked for, before the last one expires. librdkafka asks after four fifths, and so always gets a newer one."""
    name = module("count = 0\ndef make(about):\n    global count\n    count += 1\n    return f'token {count}', 100")
    now = 1000.0
    monkeypatch.setattr(tokens, "now_s", lambda: now)
    source = TokenSource(setting="x", function=f"{name}:make")
    for later, number in ((0, 1), (74, 1), (76, 2), (80, 2), (151, 3)):
        now = 1000.0 + later
        assert source.token().value == f"token {number}", later
    assert source.renewed().value == "token 4"


def test_token_of_unknown_lifetime_is_asked_for_each_time(module: Module) -> None:
    """A password of Postgres may be changed at any time. For Kafka, such a token is refused: librdkafka renews it by its lifetime."""
    name = module("count = 0\ndef make(about):\n    global count\n    count += 1\n    return f'password {count}'")
    source = TokenSource(setting="x", function=f"{name}:make")
    assert [source.token().value for _ in range(3)] == ["password 1", "password 2", "password 3"]
    with pytest.raises(BadInput, match="its token has no lifetime and is no JWT with exp"):
        TokenSource(setting="x", function=f"{name}:make", must_expire=True).token()


def test_threads_share_a_token(module: Module) -> None:
    """The clients of a process do not each ask the cloud."""
    name = module("import time\ncalls = []\ndef make(about):\n    calls.append(1)\n    time.sleep(0.1)\n    return 'x', 60")
    source = TokenSource(setting="x", function=f"{name}:make")
    threads = [threading.Thread(target=source.token) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sys.modules[name].calls) == 1


COMMANDS = {
    "fails": (f"import sys; print('{SECRET}'); sys.exit('first\\nno role for {SECRET}')", r"status 1: no role for \*\*\*"),
    "fails with a JWT": ("import sys; sys.exit('refused eyJhbGciOiJub25lIn0.eyJzdWIi.x')", r"status 1: refused \*\*\*"),
    "fails with a setting": ("import sys; sys.exit('bad password=hunter2 for me')", r"status 1: bad password\*\*\* for me"),
    "fails silently": ("import sys; sys.exit(3)", "status 3: it wrote no reason"),
    "hangs": ("import time; time.sleep(60)", "was killed, it did not end within 1 s"),
    "prints nothing": ("print()", "printed nothing. Print JSON"),
    "prints half an object": ("print('{')", "printed an object that is not JSON"),
    "prints no token": ("print('{}')", "printed a token that is missing"),
    "prints an expired token": (f"print('{jwt(exp=1000)}')", r"its token expired \d+ s ago"),
    "prints two lines": ("print('a'); print('b')", "its token has control characters"),
}


@pytest.mark.parametrize(("code", "message"), COMMANDS.values(), ids=COMMANDS)
def test_command_that_gives_no_token_has_one_error(code: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the setting, the status and the last line of stderr. What it printed is not shown, nor is anything like a secret."""
    monkeypatch.setattr(tokens, "COMMAND_LIMIT_S", 1 if "did not end" in message else 60)
    with pytest.raises(TidemarkError, match=f"^the setting: .*{message}") as raised:
        from_command(code).token()
    assert not [secret for secret in (SECRET, "eyJ", "hunter2") if secret in f"{raised.value} {raised.value!r}"]
    assert raised.value.__cause__ is None


def test_command_may_leave_a_process_that_holds_its_output() -> None:
    """Such as a daemon that keeps a login. The command has ended, and its token counts."""
    left = TokenSource(setting="x", command="sh -c 'sleep 600 & echo $!'").token().value
    os.kill(int(left), signal.SIGKILL)


@pytest.mark.parametrize(
    ("command", "message"),
    [("/no/such/program x", "/no/such/program cannot be started"), ("'open", "cannot be split into words"), (" ", "it is empty")],
)
def test_command_that_cannot_run_is_refused(command: str, message: str) -> None:
    with pytest.raises(BadInput, match=f"the setting: .*{message}"):
        TokenSource(setting="the setting", command=command).token()


FUNCTIONS = {
    "no function": ("", "module made.* has no function make"),
    "no callable": ("make = 'x'", "module made.* has no function make"),
    "does not import": ("import no_such_module", "there is no module no_such_module, which made.*:make needs"),
    "raises at import": (f"raise ValueError('key={SECRET}')", r"importing made.* raised ValueError: key\*\*\*"),
    "raises": (f"def make(about): raise OSError('token: {SECRET}')", r"made.*:make raised OSError: token\*\*\*"),
    "raises an error without a text": (
        "class E(Exception):\n    def __str__(self): return None\ndef make(about): raise E",
        "made.*:make raised E: its text cannot be shown: TypeError",
    ),
    "without a parameter": ("def make(): return 'x', 60", "made.*:make raised TypeError"),
    "returns nothing": ("def make(about): return None", "made.*:make returned NoneType. Return"),
    "returns bytes": ("def make(about): return b'x', 60", "made.*:make returned a token that is bytes"),
    "returns a date": ("def make(about): return 'x', '2026-01-01'", "made.*:make returned a lifetime that is str, not a number of seconds"),
    "returns endless": (
        "def make(about): return 'x', float('inf')",
        "made.*:make returned a lifetime that is float, not a number of seconds",
    ),
    "returns expired": ("def make(about): return 'x', -1", r"its token expired 1 s ago"),
    "returns an empty token": ("def make(about): return '', 60", "its token is empty"),
    "returns no name": ("def make(about): return 'x', 60, 7", "made.*:make returned a principal that is int"),
}


@pytest.mark.parametrize(("source", "message"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_function_that_gives_no_token_has_one_error(source: str, message: str, module: Module) -> None:
    """It names the setting and the function, and quotes nothing that may be a secret."""
    with pytest.raises(TidemarkError, match=f"^the setting: {message}") as raised:
        TokenSource(setting="the setting", function=f"{module(source)}:make").token()
    assert SECRET not in f"{raised.value} {raised.value!r}"
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("name", ["make", ":make", "module:"])
def test_function_without_a_module_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"the setting: '{name}' is not module:function"):
        TokenSource(setting="the setting", function=name).token()


def test_failure_is_not_kept(module: Module) -> None:
    """The next connection asks again."""
    name = module("calls = []\ndef make(about):\n    calls.append(1)\n    if len(calls) == 1: raise OSError('down')\n    return 'x', 60")
    source = TokenSource(setting="x", function=f"{name}:make")
    with pytest.raises(TokenUnavailable, match=r"raised OSError: down\. Nothing was connected"):
        source.token()
    assert source.token().value == "x"


# ---- the clouds


@pytest.mark.parametrize(
    ("function", "package"),
    [
        (cloud_tokens.aws_msk_iam, "aws-msk-iam-sasl-signer-python"),
        (cloud_tokens.aws_rds, "boto3"),
        (cloud_tokens.google, r"google-auth\[requests\]"),
        (cloud_tokens.azure, "azure-identity"),
    ],
)
def test_missing_library_of_a_cloud_is_named_with_its_pip_line(
    function: Callable[[dict[str, str]], object], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("aws_msk_iam_sasl_signer", "boto3", "google.auth", "azure.identity"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BadInput, match=rf"it is not installed .* pip install '{package}'"):
        function({"bootstrap.servers": "a:1"})


def test_region_comes_from_the_setting_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing one is refused."""
    regions = []

    class Provider:
        @staticmethod
        def generate_auth_token(region: str) -> tuple[str, int]:
            regions.append(region)
            return "signed", int((time.time() + 900) * 1000)

    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer", Provider)
    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer.MSKAuthTokenProvider", Provider)
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    with pytest.raises(BadInput, match="AWS region: it is not set"):
        cloud_tokens.aws_msk_iam({})
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    token, lifetime_s = cloud_tokens.aws_msk_iam({})
    cloud_tokens.aws_msk_iam({"tidemark.token.region": "eu-north-1"})
    assert (token, regions) == ("signed", ["eu-west-1", "eu-north-1"])
    assert lifetime_s == pytest.approx(900, abs=10)
