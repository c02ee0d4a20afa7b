"""What becomes of a record that was not loaded: a ladder of delays, each with a Kafka topic, drained by bounded runs.

Owns the life of a row of ``tidemark.failed_record``, and keeps I1, I3, I4, I6 and I7 for it::

      hand-off            relay                    drain, once due
    ------------> WAITING ------> <group>.retry.5m ---------------> LOADED | SKIPPED
         |           ^                                    |
         |           +--- the next delay: published anew -+ fails again
         v                                                v
       FAILED ----------> <group>.failed <------ ladder, budget over, or permanent

Where the order is by key, a later record of a key that waits is HELD, and is WAITING once nothing before it waits any more.

Postgres is the authority: the state, the due time and the payload stand in the record's row, and only the one message that is
registered there is ever tried. What else is in a retry topic - published twice, by a relay that died before it could say so, or by
somebody else - is read past and dropped. Due times are the database's clock's.

Modules::

    admin        list, count, show, export, discard and edit failed records
    agenda       which groups have records to publish or due records
    audit        where every record is, and that none is missing (I3)
    breaker      aborts a slice in which too many records fail
    filter       selects failed records by state, error, origin, key or time
    hop          a failed record as a message, with Tidemark's headers
    ladder       the next delay of a record that was not loaded
    order        holds later records of a key while one waits
    redrive      sends failed records again: plan, apply, stop
    relay        publishes the outbox and registers the messages
    retention    removes payloads of settled records
    show         a redrive as text and Markdown
    store        the statements of a drain's commit
    topics       creates and checks the retry topics
"""

from tidemark.retry.ladder import Ladder, Rung

__all__ = ["Ladder", "Rung"]
