"""Who may do what with which DAG: the roles in consumers' files in a real Airflow with FAB's auth manager, over REST.

The api-server runs alone, on SQLite, because it answers these requests before any task would run. The commands in ``docs/security.md``
create the roles and the first user; reading the DAG files grants the permissions.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.e2e.served import served
from tests.support.documented import snippets

from tidemark.local.airflow_client import CONNECTION_LIMITS

COMMON = "topics: [{name}]\ntransform: numbers:transform\nsink: {{table: public.{name}}}\n"
ACCESS = {
    "orders": "access: {edit: [team-orders], view: [analysts]}\nslo: {lag: 10m}\n",
    "rides": "access: {edit: [team-rides]}\n",
    "stray": "",
    "typo": "access: {edit: [team-order]}\n",  # not in TIDEMARK_ROLES
}
BEFORE = {**ACCESS, "rides": "access: {edit: [team-rides, analysts]}\n", "typo": "access: {edit: [team-orders]}\n"}
"""The files as Airflow reads them before those in `ACCESS`. The tests also cover the permissions that are missing from the later files."""
GHOST = {**BEFORE, "rides": "access: {edit: [ghost]}\n"}
"""The files as Airflow reads them first. They name a role that is listed in TIDEMARK_ROLES although Airflow does not have it."""

ROLES = {
    "admin": ["Admin"],
    "op": ["Op"],
    "viewer": ["Viewer"],
    "olga": ["tidemark-user", "team-orders"],
    "rita": ["tidemark-user", "team-rides"],
    "ana": ["tidemark-user", "analysts"],
    "newcomer": ["tidemark-user"],
}
NOTHING, VIEW, EDIT, ALL = range(4)
ASSETS = "assets"
"""Marks requests that need the permission to read assets, which FAB only grants for all assets at once."""
STOCK = {"admin": ALL, "op": ALL, "viewer": VIEW}
"""Users with FAB's built-in roles, which apply to all DAGs."""
TEAMS = {
    "orders": {"olga": EDIT, "ana": VIEW},
    "rides": {"rita": EDIT},
    "stray": {},
    "typo": {},
    "": {},  # the DAGs for all consumers
}
DAGS = {
    **{f"consume__{name}": name for name in ACCESS},
    **{f"{kind}__{name}": name for kind in ("rewind", "redrive", "discard") for name, access in ACCESS.items() if access},
    **dict.fromkeys(("rewind", "redrive", "discard", "drain_retries", "maintain", "watch"), ""),
}
"""Every DAG, and the consumer to which it belongs."""

DAG = "dags/{dag_id}"
RUN = DAG + "/dagRuns/{dag_run_id}"
GROUP = RUN + "/taskGroupInstances/{group_id}"
TASK = RUN + "/taskInstances/{task_id}"
MAPPED = TASK + "/{map_index}"
VARIABLES = TASK + "/state-store"
QUEUED = tuple(f"/assets/{which}queuedEvents" for which in ("", "{asset_id}/"))


def each(method: str, path: str, *ends: str) -> set[str]:
    return {f"{method} {path}{end}" for end in ends}


ACTIONS: dict[int | str, set[str]] = {
    VIEW: each("GET", DAG, "", "/details", "/tasks", "/tasks/{task_id}", "/dagVersions", "/dagVersions/{version_number}", "/dagRuns")
    | each("GET", "dagSources/{dag_id}", "")
    | each("POST", DAG, "/favorite", "/unfavorite", "/dagRuns/list")
    | each("GET", RUN, "", "/hitlDetails", "/wait", "/taskInstances")
    | each("POST", RUN, "/taskInstances/list")
    | each("GET", TASK, "", "/dependencies", "/externalLogUrl/{try_number}", "/links", "/listMapped", "/logs/{try_number}")
    | each("GET", TASK, "/tries", "/tries/{task_try_number}", "/xcomEntries", "/xcomEntries/{xcom_key}")
    | each("GET", VARIABLES, "", "/{key}")
    | each("GET", MAPPED, "", "/dependencies", "/hitlDetails", "/hitlDetails/tries/{try_number}", "/tries", "/tries/{task_try_number}"),
    EDIT: each("PATCH", DAG, "", "/dagRuns")
    | each("POST", DAG, "/dagRuns", "/clearDagRuns", "/clearPartitions", "/clearTaskInstances")
    | each("PATCH", RUN, "", "/taskInstances")
    | each("POST", RUN, "/clear")
    | {f"PATCH {path}{end}" for path in (GROUP, TASK, MAPPED) for end in ("", "/dry_run")}
    | each("PATCH", MAPPED, "/hitlDetails")
    | {f"{method} {VARIABLES}/{{key}}" for method in ("PUT", "PATCH")},
    ALL: {f"DELETE {path}" for path in (DAG, RUN, TASK, VARIABLES, VARIABLES + "/{key}")}
    | each("POST", TASK, "/xcomEntries")
    | {f"{method} {TASK}/xcomEntries/{{xcom_key}}" for method in ("PATCH", "DELETE")}
    | each("DELETE", DAG, *QUEUED),
    ASSETS: each("GET", DAG, *QUEUED) | each("GET", RUN, "/upstreamAssetEvents"),
}
"""The requests of Airflow's REST API that name a DAG, by the permission that they need."""
NOWHERE = {"task_id": "none", "map_index": "0", "group_id": "none", "xcom_key": "none", "key": "none", "asset_id": "0"}
ENTITY = {"dag_run_id": "none", "note": "none"}
BODIES = {
    "PATCH dags/{dag_id}/dagRuns": {"actions": [{"action": "update", "entities": [ENTITY]}]},
    "POST dags/{dag_id}/clearDagRuns": {"dag_runs": [ENTITY]},
}
"""Bodies of the requests that also look for the DAG in their body."""
NUMBERS = dict.fromkeys(("try_number", "task_try_number", "version_number"), "77")


def commands(page: str) -> list[list[str]]:
    """Returns the ``airflow`` commands in a page's shell blocks."""
    return [
        shlex.split(line)[1:]
        for block in snippets(page, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("airflow ")
    ]


class Airflow:
    """The api-server, and its users."""

    def __init__(self, url: str, stale: list[list[str]]) -> None:
        self.url = url
        self.stale = stale
        """The DAGs that were out of service after each reading of the files."""
        self._http: dict[str, httpx.Client] = {}

    def token(self, user: str) -> str:
        password = "changeme" if user == "olga" else user
        answer = httpx.post(f"{self.url}/auth/token", json={"username": user, "password": password}, trust_env=False, timeout=60)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["access_token"])

    def ask(self, user: str, method: str, path: str, **options: Any) -> httpx.Response:
        if user not in self._http:
            headers = {"Authorization": f"Bearer {self.token(user)}"}
            self._http[user] = httpx.Client(
                base_url=f"{self.url}/api/v2/", headers=headers, limits=CONNECTION_LIMITS, trust_env=False, timeout=60
            )
        return self._http[user].request(method, path, **options)

    def page(self, user: str, path: str) -> httpx.Response:
        """Sends a request of Tidemark's page."""
        return self.ask(user, "GET", f"{self.url}/tidemark/api/{path}")

    def close(self) -> None:
        for http in self._http.values():
            http.close()


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    home = tmp_path_factory.mktemp("teams")
    made = [
        ["users", "create", "-u", user, "-f", user, "-l", user, "-e", f"{user}@example.com", "-r", roles[0], "-p", user]
        for user, roles in ROLES.items()
        if user != "olga"  # docs/security.md creates her
    ]
    made += [["users", "add-role", "-u", user, "-r", role] for user, roles in ROLES.items() if user != "olga" for role in roles[1:]]
    env = {
        "AIRFLOW__CORE__AUTH_MANAGER": "airflow.providers.fab.auth_manager.fab_auth_manager.FabAuthManager",
        "TIDEMARK_ROLES": "team-orders, team-rides, analysts, ghost",
    }
    files = [{f"{name}.yaml": COMMON.format(name=name) + text for name, text in files.items()} for files in (GHOST, BEFORE, ACCESS)]
    with served(home, env, commands=[*commands("docs/security.md"), *made], files=files) as url:
        found = Airflow(url, [json.loads(line) for line in (home / "stale").read_text().splitlines()])
        yield found
        found.close()


def may(user: str, dag_id: str) -> int:
    """Returns what a user may do with a DAG."""
    return max(STOCK.get(user, NOTHING), TEAMS[DAGS[dag_id]].get(user, NOTHING))


def allowed(user: str, dag_id: str, needed: int | str) -> bool:
    return user in STOCK if needed == ASSETS else may(user, dag_id) >= int(needed)


def takes() -> dict[str, int | str]:
    return {action: needed for needed, actions in ACTIONS.items() for action in actions}


def test_each_dag_and_each_action_has_an_entry_in_the_matrix(airflow: Airflow) -> None:
    """A new kind of DAG, or a new request in a new Airflow version, fails here until someone decides who may use it."""
    dags = airflow.ask("admin", "GET", "dags").json()["dags"]
    assert sorted(dag["dag_id"] for dag in dags) == sorted(DAGS)
    paths = httpx.get(f"{airflow.url}/openapi.json", trust_env=False, timeout=60).json()["paths"]
    prefix = "/api/v2/"
    known = {f"{method.upper()} {path.removeprefix(prefix)}" for path, methods in paths.items() if "{dag_id}" in path for method in methods}
    assert known == set(takes())


def test_each_user_sees_exactly_their_dags(airflow: Airflow) -> None:
    """This holds for the list of DAGs and for the list of all DAG runs."""
    for dag_id in DAGS:
        conf = {"scenario": "to-latest", "reason": "a run to be seen", "consumers": ["orders"]} if dag_id.startswith("rewind") else {}
        conf = {"consumer": "orders", "reason": "a run to be seen"} if dag_id.startswith(("redrive", "discard")) else conf
        made = airflow.ask("admin", "POST", f"dags/{dag_id}/dagRuns", json={"logical_date": None, "conf": conf})
        assert made.status_code == 200, made.text
    for user in ROLES:
        theirs = sorted(dag_id for dag_id in DAGS if may(user, dag_id) >= VIEW)
        for path, key in (("dags", "dags"), ("dags/~/dagRuns", "dag_runs")):
            answer = airflow.ask(user, "GET", path, params={"limit": 100})
            seen = answer.json()[key] if answer.is_success else []
            assert (user, path, sorted({each["dag_id"] for each in seen})) == (user, path, theirs)


@pytest.mark.parametrize("user", ROLES)
def test_user_may_do_with_each_dag_what_their_roles_allow(airflow: Airflow, user: str) -> None:
    """Checks viewing, pausing, starting and answering for every DAG, and every request of Airflow's API for three kinds of DAG. Bodies with
    an unknown key and runs that do not exist keep an allowed request from changing anything: the status is 4xx, but not 403."""
    few = {"GET dags/{dag_id}", "PATCH dags/{dag_id}", "POST dags/{dag_id}/dagRuns", f"PATCH {MAPPED}/hitlDetails"}
    every = ("consume__orders", "rewind__orders", "rewind")
    wrong = []
    for dag_id in DAGS:
        for action, needed in takes().items():
            if (dag_id in every or action in few) and not (may(user, dag_id) == ALL and action == "DELETE dags/{dag_id}"):
                method, path = action.split(" ")
                body = {"json": BODIES.get(action, {"no": "such"})} if method in {"POST", "PATCH", "PUT"} else {}
                filled = path.format(dag_id=dag_id, dag_run_id="none", **NOWHERE, **NUMBERS)
                status = airflow.ask(user, method, filled, **body).status_code
                assert status not in (401, 405, 500)
                if (status != 403) != allowed(user, dag_id, needed):
                    wrong.append((dag_id, action, status))
    assert wrong == []


@pytest.mark.parametrize("user", ROLES)
def test_page_shows_each_user_exactly_their_consumers(airflow: Airflow, user: str) -> None:
    """FAB's Viewer may not see plugins. The others see the consumers whose DAGs they may see; payloads require the permission to edit."""
    if user == "viewer":
        assert airflow.page(user, "groups").status_code == 403
        return
    found = airflow.page(user, "groups").json()
    assert sorted(row["consumer"] for row in found["groups"]) == sorted(name for name in ACCESS if may(user, f"consume__{name}") >= VIEW)
    for name in ACCESS:
        level = may(user, f"consume__{name}")
        needs = {f"groups/{name}": VIEW, f"groups/{name}/records": VIEW, f"groups/{name}/records/1": EDIT}
        statuses = {path: airflow.page(user, path).status_code for path in needs}
        assert {path for path, status in statuses.items() if status == 403} == {path for path, needed in needs.items() if level < needed}
    assert [row["consumer"] for banner in found["banners"] for row in found["groups"] if row["consumer"] not in banner["consumers"]] == []


def test_team_starts_pauses_and_marks_its_own_runs(airflow: Airflow) -> None:
    """The matrix only shows that these requests are not refused; this test shows that they take effect. The team's rewind form has no field
    for consumers."""
    conf = {"scenario": "to-latest", "reason": "a rewind of the team"}
    made = airflow.ask("olga", "POST", "dags/rewind__orders/dagRuns", json={"logical_date": None, "conf": conf})
    assert (made.status_code, made.json()["triggering_user_name"]) == (200, "olga")
    run = f"dags/rewind__orders/dagRuns/{made.json()['dag_run_id']}"
    assert airflow.ask("olga", "PATCH", run, json={"state": "failed"}).json()["state"] == "failed"
    for paused in (True, False):
        assert airflow.ask("olga", "PATCH", "dags/consume__orders", json={"is_paused": paused}).json()["is_paused"] is paused
    params = airflow.ask("olga", "GET", "dags/rewind__orders/details").json()["params"]
    assert "scope" in params
    assert "consumers" not in params


def bulk(run: str) -> dict[str, Any]:
    """Requests without a DAG in their path, and their bodies."""
    entity = {"dag_id": "consume__orders", "dag_run_id": run}
    failed = {**entity, "task_id": "consume", "new_state": "failed"}
    return {
        "PATCH dags?dag_id_pattern=%25": {"is_paused": True},
        "PATCH dags/~/dagRuns": {"actions": [{"action": "update", "entities": [{**entity, "note": "not mine"}]}]},
        "PATCH dags/~/dagRuns/~/taskInstances": {"actions": [{"action": "update", "entities": [failed]}]},
        "POST dags/~/clearDagRuns": {"dag_runs": [entity], "dry_run": False},
        "POST assets/events": {"asset_id": 1},
        "POST assets/1/materialize": {},
        "GET connections": None,
        "GET variables": None,
        "GET assets/events": None,
    }


def test_request_without_a_dag_in_its_path_does_not_reach_another_teams_runs(airflow: Airflow) -> None:
    made = airflow.ask("admin", "POST", "dags/consume__orders/dagRuns", json={"logical_date": None}).json()
    run = f"dags/consume__orders/dagRuns/{made['dag_run_id']}"

    def state() -> Any:
        tasks = airflow.ask("admin", "GET", f"{run}/taskInstances").json()["task_instances"]
        dag = airflow.ask("admin", "GET", "dags/consume__orders").json()
        found = airflow.ask("admin", "GET", run).json()
        return dag["is_paused"], found["state"], found["note"], [(task["task_id"], task["state"], task["note"]) for task in tasks]

    before = state()
    for request, body in bulk(made["dag_run_id"]).items():
        answer = airflow.ask("rita", *request.split(" "), **({} if body is None else {"json": body}))
        assert state() == before, request
        refused = answer.status_code == 403 or (answer.is_success and re.search("403|not authorized", answer.text))
        assert refused, (request, answer.status_code, answer.text)


def test_listed_role_that_airflow_does_not_have_stops_all_dags_of_a_file(airflow: Airflow) -> None:
    """This is why roles are listed: a missing role in one consumer's file also takes the DAGs of other consumers out of service, until the
    role is created or its name is removed from the file."""
    with_ghost = sorted(dag_id for dag_id in DAGS if dag_id.startswith(("consume", "rewind", "redrive", "discard")))
    assert airflow.stale == [with_ghost, [], []]


def test_role_that_is_not_listed_is_told_on_the_page_of_the_dag(airflow: Airflow) -> None:
    """Other consumers keep their DAGs, which Airflow would take out of service because of a role that it does not know."""
    dag = airflow.ask("admin", "GET", "dags/consume__typo/details").json()
    assert '"team-order" is not in TIDEMARK\\_ROLES: write team-orders' in dag["doc_md"]
    assert "bad access" in [tag["name"] for tag in dag["tags"]]
    (error,) = airflow.ask("admin", "GET", "importErrors").json()["import_errors"]
    assert error["filename"] == "broken_consumers.py"
    assert re.search(r'typo\.yaml:\d+:\d+: "team-order" is not in TIDEMARK_ROLES', error["stack_trace"])
