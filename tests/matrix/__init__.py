"""The versions that Tidemark was tried with: `columns` says what differs in each, `python -m tests.matrix NAME` runs one and stores the result.

``make matrix WHAT=spark-4.0`` is the same. The results are in ``include/tidemark/doctor/tried.json``, which ships with the package:
`tidemark doctor` compares what it finds with it, and ``docs/compatibility.py`` writes ``docs/compatibility.md`` from it.
"""
