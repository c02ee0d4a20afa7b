"""What Tidemark's claims about speed rest on, measured in one run, on the same data and the same machine.

    python -m benchmarks                 the ratios, against the limit and against what a Kafka user would take otherwise
    python -m benchmarks --what growth   how rates change with records, partitions, row width and the kind of sink
    python -m benchmarks --what cold     a small scheduled run: seconds to the first commit, and where they go
    python -m benchmarks --what where    CPU of the Python worker's path, stage by stage
    python -m benchmarks --report        the last run's figures into docs/benchmarks.md

    __main__ ── stage (servers, topics, table) ── harness (rounds, checks) ──one process a seat──▶ seat: limit, product, jdbc,
                                                     │                                            loop, connect, quix
                                                     └── cpu (by family of process) ── report (tables, bench.json)

Each contestant lives in a process of its own, its *seat*, and stays warm in it. Whoever lost or doubled a row has no figure.
This file imports nothing, because one of the seats runs in an environment without Tidemark.
"""
