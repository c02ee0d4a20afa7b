"""Which records, and what became of them: the values that all packages above share.

`ranges` has partitions, claims, slices and the plan of a batch, `outcome` what a transform may answer for a record and how it is counted.
"""
