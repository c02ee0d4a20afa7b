"""The rows of a sink that a rewind takes out, and that its undo puts back.

Modules::

    archive      moves rows out of the sink, and back
    deletions    takes deletions of an upsert sink back, and repeats them
    overwritten  rows of an upsert sink that a replay overwrites
"""
