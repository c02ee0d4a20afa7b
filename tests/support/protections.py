"""The protections of the commit path, and the test that notices if one is missing."""

from __future__ import annotations

from dataclasses import dataclass

COMMIT, FENCE, INPUTS, POISON, STAGED = (
    f"tests/integration/{name}.py"
    for name in ("sink/test_commit", "offsets/test_fence_machine", "consume/test_inputs", "sink/test_poison", "sink/test_staged")
)
CAS = "   AND owner_epoch = %(epoch)s AND next_offset = %(start)s RETURNING next_offset;\n\n-- name: read_offset"


@dataclass(frozen=True)
class Without:
    """Takes a protection away: replaces texts of a file below ``include/tidemark``, and names the test that notices it."""

    file: str
    edits: dict[str, str]
    noticed_by: str
    """The node id of a test of the short run."""


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
    "the epoch that a claim raises": Without(
        "offsets/store.sql",
        {"%(generation)s, owner_epoch = owner_epoch + 1": "%(generation)s, owner_epoch = owner_epoch"},
        f"{COMMIT}::test_a_stale_epoch_is_fenced_before_a_byte_is_sent",
    ),
    "the generation that a claim compares": Without(
        "offsets/store.sql",
        {"AND (generation < %(generation)s OR (generation = %(generation)s AND (owner = %(owner)s OR owner IS NULL)))\n": "\n"},
        f"{FENCE}::test_an_older_generation_claims_nothing",
    ),
    "the compare-and-set before the COPY": Without(
        "sink/commit.py",
        {
            "twin = store.move_offset(cur, target.position_of, part, ledger=target.group_id)\n": "twin = None\n",
            "    reached(Step.COPY_FAILED, parts[0])\n": "    store.move_offset(cur, target.position_of, parts[0])\n",
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
        f"{INPUTS}::test_aborted_transactions_are_not_read_and_count_as_unaccounted",
    ),
    "the failed record for a refused one": Without(
        "sink/load.py",
        {"        tally.refuse(reject(": "        str(reject("},
        f"{POISON}::test_bad_rows_of_several_partitions_and_kinds",
    ),
    "the count of staged rows": Without(
        "sink/staged.py",
        {"    if count != expected:": "    if False:"},
        f"{STAGED}::test_rows_that_a_crash_of_postgres_took_from_the_staging_table_are_missed",
    ),
    "the tries whose staged rows count": Without(
        "sink/staged.py",
        {'reported = f"try_id = ANY (ARRAY': 'reported = "true" or f"try_id = ANY (ARRAY'},
        f"{STAGED}::test_rows_of_a_try_that_nobody_heard_of_are_not_promoted",
    ),
}
