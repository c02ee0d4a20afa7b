"""The versions that Tidemark was tried with.

`columns` states what differs in each; ``make matrix WHAT=spark-4.0`` runs one, and stores the result.

The results are in ``include/tidemark/doctor/tried.json``, which ships with the package: `tidemark doctor` compares what it finds with it,
and ``docs/compatibility.py`` writes ``docs/compatibility.md`` from it.
"""
