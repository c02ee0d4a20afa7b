"""The command line: ``tidemark NOUN VERB``. Results on stdout (``--output json`` for programs), the rest on stderr.

Exit status: 0 done, 1 refused or failed, 2 wrong usage.
"""

from tidemark.cli.main import main

__all__ = ["main"]
