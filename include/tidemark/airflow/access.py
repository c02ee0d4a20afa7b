"""Who may use the DAGs: the roles that consumers' files name, as the ``access_control`` of Airflow's DAGs.

Airflow's auth manager decides about every request. FAB's auth manager stores the ``access_control`` of each DAG when
the DAG processor has read it, and the roles must exist by then. If one does not, Airflow takes all DAGs of the same file out of service, so
a file may only name roles that the deployment has listed (``TIDEMARK_ROLES``). A role that is not listed costs nobody but this consumer's
teams their access.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from airflow.configuration import conf

from tidemark.spec import ConsumerSpec, Problem
from tidemark.text.wording import nearest, quoted

ROLES_VARIABLE = "TIDEMARK_ROLES"
AccessControl = dict[str, dict[str, set[str]]]
"""The permissions of roles on the resources of a DAG. Empty: only roles with permissions on all DAGs, such as FAB's Admin."""
VIEW, EDIT = frozenset({"can_read"}), frozenset({"can_read", "can_edit"})


def shared_access(specs: Iterable[ConsumerSpec]) -> AccessControl | None:
    """For a DAG that acts on all consumers: administrators only, as soon as one consumer has ``access``. None: Airflow's permissions stay
    as they are."""
    return {} if any(spec.access is not None for spec in specs) else None


def access_of(spec: ConsumerSpec, specs: Iterable[ConsumerSpec]) -> AccessControl | None:
    """For a DAG of one consumer out of ``specs``: its roles. Administrators only, if it has no ``access`` or `problems` with it."""
    if spec.access is None or problems(spec):
        return shared_access([spec, *specs])
    view = {role: {"DAGs": set(VIEW)} for role in spec.access.view}
    return view | {role: {"DAGs": set(EDIT)} for role in spec.access.edit}


def problems(spec: ConsumerSpec) -> list[Problem]:
    """The reasons why this Airflow cannot enforce a consumer's ``access``. Empty if it can, or if the consumer has none."""
    if spec.access is None:
        return []
    manager = conf.get("core", "auth_manager")
    if not _keeps_access(manager):
        name = manager.rpartition(".")[2]
        fix = "use the FAB auth manager, or remove the key"
        if name == "SimpleAuthManager":
            fix = "use the FAB auth manager, give every user of simple_auth_manager_users the role admin, or remove the key"
        return [spec.problem(("access",), f"access is not in force: {name} ignores the access of single DAGs", fix)]
    listed = [role.strip() for role in os.environ.get(ROLES_VARIABLE, "").split(",") if role.strip()]
    problems_found = []
    for key in ("edit", "view"):
        for index, role in enumerate(getattr(spec.access, key)):
            if role not in listed:
                closest = nearest(role, listed)
                fix = f"write {closest}" if closest else f"create the role in Airflow, then add it to {ROLES_VARIABLE} of the DAG processor"
                problems_found.append(spec.problem(("access", key, index), f"{quoted(role)} is not in {ROLES_VARIABLE}", fix))
    return problems_found


def _keeps_access(manager: str) -> bool:
    """Whether Airflow keeps the access of single DAGs. It stores ``access_control`` for auth managers of this name only."""
    if manager.endswith(".SimpleAuthManager"):  # has roles for all DAGs only, which does no harm if everyone is an administrator
        users = conf.getlist("core", "simple_auth_manager_users")
        return conf.getboolean("core", "simple_auth_manager_all_admins") or all(user.split(":")[1:2] == ["admin"] for user in users)
    return "FabAuthManager" in manager
