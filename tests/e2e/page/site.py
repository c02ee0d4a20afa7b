"""The api-server of the page's tests, and its users."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from tests.e2e.page.data import Data

USERS = {"adam": "admin", "olga": "op", "uma": "user", "vic": "viewer"}


class Site:
    """The api-server and its users."""

    def __init__(self, url: str, home: Path, data: Data) -> None:
        self.url, self.data = url, data
        self.passwords = json.loads((home / "passwords.json").read_text())
        self.routes: list[list[str]] = json.loads((home / "routes").read_text())
        self.parameters: dict[str, list[str]] = json.loads((home / "parameters").read_text())
        self._tokens: dict[str, str] = {}

    def token(self, user: str) -> str:
        if user not in self._tokens:
            login = {"username": user, "password": self.passwords[user]}
            answer = httpx.post(f"{self.url}/auth/token", json=login, trust_env=False, timeout=60)
            assert answer.status_code == 201, answer.text
            self._tokens[user] = answer.json()["access_token"]
        return self._tokens[user]

    def get(self, path: str, user: str = "adam") -> httpx.Response:
        cookies = {"_token": self.token(user)} if user else {}
        return httpx.get(f"{self.url}/tidemark/{path}", cookies=cookies, trust_env=False, timeout=60)

    def pause(self, dag_id: str, paused: bool) -> None:
        headers = {"Authorization": f"Bearer {self.token('adam')}"}
        answer = httpx.patch(f"{self.url}/api/v2/dags/{dag_id}", json={"is_paused": paused}, headers=headers, trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text

    def json(self, path: str, user: str = "adam") -> Any:
        answer = self.get(path, user)
        assert answer.status_code == 200, answer.text
        return answer.json()
