"""``tidemark metrics serve``: metrics for Prometheus.

Modules::

    ledger    counters of commits since the process began
    families  the metrics, by name, with their labels
    serve     the process: samples the ends of all consumers' topics, and answers scrapes

A scrape reads Postgres only, in one transaction. The process itself queries Kafka, every 30 s, so that a scrape never waits for it.
Without the database, a scrape has nothing but `tidemark_up` with 0.
"""
