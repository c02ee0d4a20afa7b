"""``tidemark metrics serve``: what Prometheus scrapes.

Modules::

    ledger     what was committed since the process began: counters
    state      what is pending, lost, rewound and validated now: gauges
    families   the metrics, by name, with their labels
    serve      the process: samples the ends of all consumers' topics, and answers scrapes

A scrape reads Postgres only, in one transaction. Kafka is asked by the process itself, every 30 s, so that a scrape never waits for it.
If the database does not answer, a scrape has `tidemark_up` with 0 and nothing else.
"""
