"""Values of the DAGs' forms, as Airflow passes them to the tasks. The consumer is missing: a form of its own has a field for it."""

from __future__ import annotations

from typing import Any

from tidemark.airflow.approvals import rewind_form
from tidemark.airflow.approvals.records_form import REDRIVE_FIELDS

REWOUND: dict[str, Any] = {
    **dict.fromkeys(rewind_form.FIELDS),
    "scope": "all",
    "scenario": "to-earliest",
    "reason": "the transform was wrong",
    "expires_in": "4h",
    "allow_loss": False,
    "backfill": False,
}
REDRIVEN: dict[str, Any] = {**dict.fromkeys(REDRIVE_FIELDS), "refused": False, "reason": "the service is back"}
