"""Tidemark's use of Kafka. Nothing here joins a Kafka consumer group, and no offset in Kafka is an authority (I7).

Ends are last stable offsets: beyond them, a read_committed reader would wait for an open transaction.

Modules::

    cluster     look-ups: topics, UUIDs, partitions, log starts, last stable offsets
    compiled    polls without a Python object for each message, in C (`tidemark.native`)
    contact     tells a wrong address from a slow cluster
    config      one set of client settings for librdkafka and the JVM's client
    failures    classifies Kafka's errors: outage, missing permission, refusal
    groups      consumer groups in Kafka: live members, offsets mirrored there
    oauth       where tokens for SASL OAUTHBEARER come from
    poll        polled records as columns; the poller that needs no compiler
    producer    publishes messages, with a report for each one
    reader      reads `[start, end)` of one partition
    security    TLS and SASL settings in the names of both clients
    truncation  detects a truncated log by its leader epochs (KIP-320)
"""
