"""Kafka as Tidemark uses it. Nothing here joins a Kafka consumer group or commits to Kafka (I7).

Ends are last stable offsets: beyond them, a read_committed reader would wait for an open transaction.

- `cluster` looks up topics, settings and offsets, and creates topics; `history` finds out whether a log was truncated.
- `reader` reads exactly ``[start, end)`` of a partition; `producer` publishes messages within a known time.
- `config` checks client settings and translates them for the JVM's client; `security` does so for TLS and SASL.
"""
