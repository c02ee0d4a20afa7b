"""Removes each protection of the commit path in a copy of the project: some test must fail without it.

A protection whose absence goes unnoticed may be lost in the next change. The same tests pass on the unchanged project.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tidemark import project
from tidemark.local import LocalStack

COPIED = ("include", "sql", "spark_jobs", "tests", "docs", "pyproject.toml")
COMMIT, MACHINE, POISON, STAGED = "test_commit.py", "test_fence_machine.py", "test_poison.py", "test_staged.py"
CAS = "   AND owner_epoch = %(epoch)s AND next_offset = %(start)s RETURNING next_offset;\n\n-- name: read_offset"


@dataclass(frozen=True)
class Without:
    """Takes a protection away: replaces texts of a file below ``include/tidemark``, and names the tests that notice it."""

    file: str
    edits: dict[str, str]
    noticed_by: str


PROTECTIONS: dict[str, Without] = {
    "the compare-and-set": Without(
        "offsets/store.sql",
        {CAS: CAS.replace("   AND owner_epoch = %(epoch)s AND next_offset = %(start)s ", "")},
        f"{COMMIT}::test_a_stale_epoch_is_fenced_before_a_byte_is_sent",
    ),
    "the epoch in the compare-and-set": Without(
        "offsets/store.sql",
        {CAS: CAS.replace("owner_epoch = %(epoch)s AND ", "")},
        f"{COMMIT}::test_an_epoch_that_was_never_given_is_fenced",
    ),
    "the offset in the compare-and-set": Without(
        "offsets/store.sql",
        {CAS: CAS.replace(" AND next_offset = %(start)s", "")},
        f"{COMMIT}::test_a_slice_that_does_not_begin_at_the_position_is_fenced",
    ),
    "the epoch that a claim raises": Without("offsets/store.sql", {"owner_epoch = owner_epoch + 1": "owner_epoch = owner_epoch"}, MACHINE),
    "the generation that a claim compares": Without(
        "offsets/store.sql",
        {"AND (generation < %(generation)s OR (generation = %(generation)s AND (owner = %(owner)s OR owner IS NULL)))\n": "\n"},
        MACHINE,
    ),
    "the compare-and-set before the COPY": Without(
        "sink/commit.py",
        {
            "twin = store.move_offset(cur, target.position_of, part, ledger=target.group_id)\n": "twin = None\n",
            "        reached(Step.COPY_FAILED, part)\n": "        store.move_offset(cur, target.position_of, part)\n",
        },
        f"{COMMIT}::test_a_stale_epoch_is_fenced_before_a_byte_is_sent",
    ),
    "the count of rows": Without(
        "sink/load.py", {"    if cur.rowcount != stream.rows:": "    if False:"}, f"{COMMIT}::test_rows_that_a_trigger_swallows_are_noticed"
    ),
    "the ledger that tells a twin": Without(
        "offsets/store.py",
        {"if row[:2] == (part.end, part.epoch) else None": "if False else None"},
        f"{COMMIT}::test_a_twin_gets_the_receipt_of_the_first",
    ),
    "the look at the ledger after a lost COMMIT": Without(
        "sink/commit.py",
        {"                _require_committed(target, parts[0], error)\n": "                pass\n"},
        f"{COMMIT}::test_a_commit_that_did_not_arrive_is_an_outage_and_can_be_tried_again",
    ),
    "read_committed in the worker": Without(
        "kafka/reader.py",
        {'"isolation.level": "read_committed"': '"isolation.level": "read_uncommitted"'},
        "test_consume_inputs.py -k aborted",
    ),
    "the failed record for a refused one": Without(
        "sink/load.py",
        {"        tally.refuse(rows.column": "        len(rows.column"},
        f"{POISON}::test_bad_rows_of_several_partitions_and_kinds",
    ),
    "the count of staged rows": Without(
        "sink/staged.py",
        {"    if found != sum(one.rows for one in staged):": "    if False:"},
        f"{STAGED}::test_rows_that_a_crash_of_postgres_took_from_the_staging_table_are_missed",
    ),
    "the tries whose staged rows count": Without(
        "sink/staged.py",
        {'return f"try_id = ANY (ARRAY': 'return "true" or f"try_id = ANY (ARRAY'},
        f"{STAGED}::test_rows_of_a_try_that_nobody_heard_of_are_not_promoted",
    ),
}


@pytest.mark.parametrize("without", PROTECTIONS.values(), ids=PROTECTIONS.keys())
def test_a_missing_protection_is_noticed(stack: LocalStack, tmp_path: Path, without: Without) -> None:
    """The named tests fail in the copy, so they were found, and they ran."""
    root = project.root()
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(root / name, tmp_path / name)
    file = tmp_path / "include" / "tidemark" / without.file
    text = file.read_text()
    for there, instead in without.edits.items():
        assert text.count(there) == 1, f"{without.file} does not have {there!r} once: correct the table of this test"
        text = text.replace(there, instead)
    file.write_text(text)

    where, _, options = without.noticed_by.partition(" ")
    own = ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tmp'}"]  # otherwise pytest closes the shared folder to other users
    quick = "--hypothesis-profile=first-failure"
    command = [sys.executable, "-m", "pytest", "-qx", *own, quick, f"tests/integration/{where}", *options.split()]
    env = {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "include"),
        "TIDEMARK_HOME": str(tmp_path),
        "TIDEMARK_TEST_STACK": str(stack.folder),
        "TIDEMARK_TEST_ALL": "1",  # a sample of the examples may not notice it
    }
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, f"nothing noticed: {done.stdout[-3000:]}{done.stderr[-1000:]}"
    assert "1 failed" in done.stdout, done.stdout[-3000:]
