"""What becomes of a record that was not loaded: a ladder of delays, each with a Kafka topic, drained by bounded runs.

Owns the life of a row of ``tidemark.failed_record``, and keeps I1, I3, I4, I6 and I7 for it::

      hand-off            relay                    drain, once due
    ------------> WAITING ------> <group>.retry.5m ---------------> LOADED | SKIPPED
         |           ^                                    |
         |           +--- the next delay: published anew -+ fails again
         v                                                v
       FAILED ----------> <group>.failed <------ ladder, budget over, or permanent

Where the order is by key, a later record of a key that waits is HELD, and is WAITING once nothing before it waits any more.

``ladder`` decides, from numbers alone, where a record goes next. ``store`` holds the statements of a drain's commit. ``drain`` says what
is due and how far each retry topic may be read. ``audit`` proves that every record is somewhere, and only once. ``topics`` makes and
checks the topics, ``relay`` publishes, ``admin`` and ``redrive`` are what an operator does.

Postgres is the authority: the state, the due time and the payload stand in the record's row, and only the one message that is
registered there is ever tried. What else is in a retry topic - published twice, by a relay that died before it could say so, or by
somebody else - is read past and dropped. Due times are the database's clock's.
"""

from tidemark.retry.ladder import Ladder, Rung

__all__ = ["Ladder", "Rung"]
