"""Commands for the author of a consumer, before it runs.

Modules::

    alter           the statements that fit the tables to the rows, with their views
    check           finds every problem of a consumer before it runs
    describe        the columns that a transform returns, found without reading a record
    explanation     a consumer's file in sentences
    json_sample     columns for JSON, from sampled records
    latest_records  the latest records of topics
    new_consumer    generates a starter consumer from its topic
    noticed         what the latest records show besides their rows
    try_records     shows the rows that a consumer would load from the latest records
"""
