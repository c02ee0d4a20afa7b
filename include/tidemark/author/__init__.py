"""For the author of a consumer, before it runs.

Modules::

    check           finds every problem of a consumer before it runs
    describe        the columns that a transform returns, found without reading a record
    json_sample     columns for JSON, by sampled records
    latest_records  the latest records of topics
    new_consumer    a consumer to start from, by what its topic holds
    try_records     what a consumer would make of the latest records
"""
