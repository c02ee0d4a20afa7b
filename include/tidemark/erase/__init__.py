"""Erasures remove a person's rows from a sink and from everything that Tidemark keeps of them, and say how many there were.

The package owns the tables ``erasure`` and ``erased``, and keeps I3: the ledger still counts what was loaded, and conservation subtracts
what was erased since. States::

    PLANNED --apply--> APPLIED

An erasure cannot be undone. Neither its condition nor any erased data is stored. It is one transaction under the group's rewind lock; if it
fails, nothing was removed.

Modules::

    erasure     plans, applies, reads and lists erasures
"""
