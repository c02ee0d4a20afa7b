"""Retries of records that were not loaded: a ladder of delays, one Kafka topic per delay, drained by bounded runs.

Owns the life cycle of a row of ``tidemark.failed_record`` and guarantees I1, I3, I4, I6 and I7 for it::

      hand-off            relay                    drain, once due
    ------------> WAITING ------> <group>.retry.5m ---------------> LOADED | SKIPPED
         |           ^                                    |
         |           +--- next delay: published again ----+ fails again
         v                                                v
       FAILED ----------> <group>.failed <------ ladder or budget exhausted, or permanent

With ``order: key``, later records of a key that is waiting are HELD. They become WAITING once no earlier record of the key is waiting.

Postgres is the authority. The record's row holds its state, due time and payload. Only the message that is registered there is tried; any
other message in a retry topic is skipped: a duplicate from a relay that died before it registered the message, or a message from another
producer. Due times follow the database's clock.

Modules::

    admin              list, count, show, export, discard and edit failed records
    breaker            aborts a slice in which too many records fail
    filter             selects failed records by state, error, origin, key or time
    ladder             the delays of retries, and their topics
    messages           a failed record as a message, with Tidemark's headers
    order              holds later records of a key while one waits
    payload_retention  removes payloads of settled records
    pending            groups with records to publish or due records
    redrive            sends failed records again: plan, apply, stop
    redrive_text       formats a redrive as text and Markdown
    relay              publishes the outbox and registers the messages
    store              statements on waiting records
    topics             creates and checks the retry topics
"""

from tidemark.retry.ladder import Ladder

__all__ = ["Ladder"]
