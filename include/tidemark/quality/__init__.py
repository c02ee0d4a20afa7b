"""Validates the rows of a run: Great Expectations over the sink's rows in Postgres, and the conservation check over all records.

Owns the tables ``validation``, ``validation_result`` and ``validation_row``, and the columns ``batch.validation_id`` and
``partition_offset.validated_offset``. Checks I3. The states of a batch::

    committed --validate--> passed, warning  -- the validated offset of its partition moves past it once it reaches it
                   |  ^
                   v  | validated again after a repair
                critical                     -- the validated offset stops before it

An unusable suite file (`BadSuite`) or an expectation that could not be evaluated (`ExpectationError`) gives no verdict, and nothing is
stored. The same holds for a crash between reading and storing: validate again. `validate_with_earlier` also judges other runs
without a verdict, and `announcements` lists verdicts that no event has announced. Readers choose: the sink shows every committed row, its
view (`validated_view_ddl`) only the rows below the validated offset.

`tidemark.rewind.reaction` rewinds a run with a critical verdict. It is not here because rewinds use this package.

Modules::

    announcements    verdicts that no asset event has announced yet
    audit            the location of every record, and missing records (I3)
    conservation     the ledger compared with sink, failed records and positions (I3)
    expectations     runs Great Expectations over the rows of a run
    merged_ranges    the offset ranges that a run wrote
    stored_verdicts  reads stored verdicts
    suite            reads suite files
    validation       validates a run and stores the verdict
    verdict          a validation's input and result
    view             the DDL of the view of validated rows
"""

from tidemark.quality.announcements import announced, unannounced
from tidemark.quality.conservation import Violation, ViolationKind, check_conservation
from tidemark.quality.expectations import ExpectationError
from tidemark.quality.suite import BadSuite, load_suite, suite_files
from tidemark.quality.validation import unjudged, validate, validate_with_earlier
from tidemark.quality.verdict import ExpectationResult, Reaction, Severity, ValidatedRun, ValidationReport, Verdict, reaction
from tidemark.quality.view import validated_view, validated_view_ddl

__all__ = [
    "BadSuite",
    "ExpectationError",
    "ExpectationResult",
    "Reaction",
    "Severity",
    "ValidatedRun",
    "ValidationReport",
    "Verdict",
    "Violation",
    "ViolationKind",
    "announced",
    "check_conservation",
    "load_suite",
    "reaction",
    "suite_files",
    "unannounced",
    "unjudged",
    "validate",
    "validate_with_earlier",
    "validated_view",
    "validated_view_ddl",
]
