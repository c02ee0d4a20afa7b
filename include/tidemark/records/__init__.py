"""Values that all other packages share: ranges of records, and their outcomes.

`ranges` has partitions, claims, slices and the planning of a batch; `outcome` has what a transform may return for a record and the counts.
"""
