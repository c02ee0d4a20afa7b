"""Retries of records that were not loaded: a ladder of delays, one Kafka topic per delay, drained by bounded runs.

Owns the life cycle of a row of ``tidemark.failed_record`` and keeps I1, I3, I4, I6 and I7 for it::

      hand-off            relay                    drain, once due
    ------------> WAITING ------> <group>.retry.5m ---------------> LOADED | SKIPPED
         |           ^                                    |
         |           +--- next delay: published again ----+ fails again
         v                                                v
       FAILED ----------> <group>.failed <------ ladder or budget over, or permanent

With ``order: key``, later records of a key that is waiting are HELD. They become WAITING once no earlier record of the key is waiting.

- ``ladder`` computes where a record goes next. ``breaker`` gives a slice up when too many of its records fail. ``order`` keeps the records
  of a key in order.
- ``store`` holds the statements of a drain's commit: what is due, how far each retry topic may be read, what became of each record.
- ``topics`` creates and checks the topics, ``messages`` encodes a record as a Kafka message, ``relay`` publishes.
- ``pending`` reports what there is to publish and to try between runs.
- ``admin`` and ``redrive`` are an operator's actions, ``filter`` selects the records for them, ``show`` displays a redrive.
- ``retention`` deletes the payloads of settled records.

Postgres is the authority. The record's row holds its state, due time and payload, and only the one message that is registered there is
ever tried. Any other message in a retry topic is skipped: a duplicate from a relay that died before it registered the message, or a
message from another producer. Due times are by the database's clock.
"""

from tidemark.retry.ladder import Ladder, Rung

__all__ = ["Ladder", "Rung"]
