"""Values that all other packages share: ranges of records, and their outcomes.

Modules::

    outcome    what a transform may return for a record, and the counts
    ranges     partitions, claims, slices, and the plan of a batch
"""
