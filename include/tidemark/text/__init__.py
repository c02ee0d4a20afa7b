"""What operators type and read: times, durations, reasons, and how numbers and names are written.

Pure functions, which know neither Kafka nor Postgres.

Modules::

    duration    durations such as `30s` and `5m`
    moment      times and ISO 8601 durations as people write them
    problems    everything that is wrong with a request, reported at once
    storable    what a column of Postgres can hold
    wording     quotes, escapes and counts
"""
