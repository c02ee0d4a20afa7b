"""Kafka as Tidemark uses it: look-ups of topics and offsets, and exact reads of ``[start, end)``.

Nothing here joins a Kafka consumer group or commits to Kafka (I7). Ends are last stable offsets: beyond them a read_committed
reader would wait for somebody's open transaction.
"""
