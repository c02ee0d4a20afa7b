"""The command line: ``tidemark NOUN VERB``. Results on stdout (``--output json`` for programs), the rest on stderr.

`main` has the commands, the modules beside it what they print. Exit status: 0 done, 1 refused or failed, 2 wrong usage.
"""
