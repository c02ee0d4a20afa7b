"""Erasures remove a person's rows from a sink and from everything that Tidemark keeps of them, and say how many there were.

The package owns the tables ``erasure``, ``erased``, ``suppressed`` and ``suppressed_key``, and keeps I3: the ledger still counts what was
loaded, and conservation subtracts what was erased since. Replays skip what is suppressed. States::

    PLANNED --apply--> APPLIED

An erasure cannot be undone. Neither its condition or key nor any erased data is stored. It is one transaction, under a lock that keeps
rewinds and drains of the group out and another that keeps commits out; if it fails, nothing was removed.

Modules::

    erasure        plans, applies, reads and lists erasures
    kafka_records  finds the records of a key in Kafka, and until when Kafka keeps what was found
"""
