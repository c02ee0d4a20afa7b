"""Measurements behind Tidemark's claims about speed. All contestants load the same data on the same machine.

    python -m benchmarks                 ratios to the limit and to the usual alternatives
    python -m benchmarks --what growth   how rates change with records, partitions, row width and the kind of sink
    python -m benchmarks --what cold     a small scheduled run: seconds to the first commit, by stage
    python -m benchmarks --what where    CPU of the Python worker, by stage
    python -m benchmarks --report        writes the last run's figures into docs/benchmarks.md

    __main__ ── stage (servers, topics, table) ── harness (rounds, checks) ──one process a seat──▶ seat: limit, product, jdbc,
                                                     │                                            loop, connect, quix
                                                     └── cpu (by family of process) ── report (tables, bench.json)

Each contestant runs in its own process, its *seat*, which stays warm between rounds. A contestant that lost or duplicated a row gets no
figure. This file imports nothing, because one of the seats runs in an environment without Tidemark.
"""
