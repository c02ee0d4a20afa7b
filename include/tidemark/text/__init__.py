"""Text that operators type and read: times, durations, reasons, numbers and names.

Pure functions, independent of Kafka and Postgres.

Modules::

    duration    durations such as `30s` and `5m`
    moment      times and ISO 8601 durations
    problems    collects all problems of a request, to report them at once
    storable    values that a Postgres column can hold
    wording     quotes, escapes and counts
"""
