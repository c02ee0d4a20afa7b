"""Values that all other packages share: ranges of records, and their outcomes.

Modules::

    outcome    outcomes of records, and their counts
    ranges     partitions, claims, slices, and the plan of a batch
"""
