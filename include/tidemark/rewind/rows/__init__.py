"""The rows of a sink that a rewind takes out, and that its undo puts back.

Modules::

    archive      moves rows out of the sink, and back
    deletions    parks and restores deletions of an upsert sink
    overwritten  keeps and restores rows of an upsert sink that a replay overwrites
"""
