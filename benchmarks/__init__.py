"""Measurements behind Tidemark's claims about speed. All contestants load the same data on the same machine.

    python -m benchmarks                 ratios to the limit and to the usual alternatives
    python -m benchmarks --what fleet    one measurement by its name; ``all`` for all of them
    python -m benchmarks --report        writes the last run's figures into docs/benchmarks.md

`benchmarks.measurement` says how a measurement is declared, `benchmarks.__main__` lists all of them. ``harness`` holds what they share: the
servers (`stage`), the processes of contestants (`seat`), and their turns (`turns`). ``records`` holds the data. The other folders are named
after what is measured. This file imports nothing, because one of the contestants runs in an environment without Tidemark.
"""
