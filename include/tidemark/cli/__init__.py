"""The command line: ``tidemark NOUN VERB``. Results on stdout (``--output json`` for programs), the rest on stderr.

Exit status: 0 done, 1 refused or failed, 2 wrong usage.

Modules::

    assign      `tidemark assign`
    audit       `tidemark audit`
    backfill    `tidemark backfill`
    check       `tidemark consumers check` and `tidemark sink ddl`
    consume     `tidemark consume`
    flow        `tidemark pause`, `resume` and `flow`
    groups      `tidemark groups`
    main        the commands, and how errors are reported
    maintain    `tidemark maintain`
    offsets     `tidemark offsets`
    options     consoles and options that the commands share
    redrive     `tidemark redrive`
    retries     `tidemark retries`
    rewind      `tidemark rewind` and `tidemark seek`
    validate    `tidemark validate`
"""
