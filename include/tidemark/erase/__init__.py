"""Erasures remove a person's rows from a sink and from all copies that Tidemark keeps, and count them.

The package owns the tables ``erasure``, ``erased``, ``suppressed`` and ``suppressed_key``, and guarantees I3: the ledger still counts all
loaded rows, and conservation subtracts the erased ones. Replays skip suppressed records and keys. States::

    PLANNED --apply--> APPLIED

An erasure cannot be undone. Neither its condition or key nor any erased data is stored. It is one transaction, under one lock that blocks
rewinds and drains of the group and another that blocks commits; if it fails, nothing is removed.

Modules::

    erasure        plans, applies, reads and lists erasures
    kafka_records  finds the records of a key in Kafka, and the end of their retention
"""
