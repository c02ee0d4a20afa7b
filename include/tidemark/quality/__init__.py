"""Great Expectations judges what a run wrote, in Postgres, and the conservation check says whether every record is accounted for.

Owns the tables ``validation``, ``validation_result`` and ``validation_row``, ``batch.validation_id`` and
``partition_offset.validated_offset``; checks I3. A batch's life here::

    committed --validate--> passed, warning  -- the validated offset of its partition moves over it, once it has reached it
                   |  ^
                   v  | validated again, after a repair
                critical                     -- the validated offset stops before it

What fails: an unusable suite file (`BadSuite`) or an expectation that could not be evaluated (`ExpectationError`) stores nothing and is
no verdict. A crash between reading and storing stores nothing either; validate again. Readers choose: the sink shows everything that was
committed, its view (`validated_view_ddl`) only what lies below the validated offset.

Great Expectations is imported when `judge` first needs it. `reaction` is imported by its callers only, because rewinds use this package.

Modules::

    conservation    the ledger compared with sink, failed records and positions (I3)
    judge           runs Great Expectations over the rows of a run
    ranges          the offset ranges that a run wrote
    reaction        the rewind after a critical verdict (`on_failure: rewind`)
    suite           reads suite files
    validation      validates a run and stores the verdict
    verdict         a validation's input and result
    view            the DDL of the view of validated rows
"""

from tidemark.quality.conservation import Violation, ViolationKind, check_conservation
from tidemark.quality.expectations import ExpectationError
from tidemark.quality.suite import BadSuite, check_suite, load_suite
from tidemark.quality.validation import unjudged, validate
from tidemark.quality.verdict import ExpectationResult, Reaction, RunCounts, Severity, ValidatedRun, ValidationReport, Verdict, reaction
from tidemark.quality.view import validated_view, validated_view_ddl

__all__ = [
    "BadSuite",
    "ExpectationError",
    "ExpectationResult",
    "Reaction",
    "RunCounts",
    "Severity",
    "ValidatedRun",
    "ValidationReport",
    "Verdict",
    "Violation",
    "ViolationKind",
    "check_conservation",
    "check_suite",
    "load_suite",
    "reaction",
    "unjudged",
    "validate",
    "validated_view",
    "validated_view_ddl",
]
