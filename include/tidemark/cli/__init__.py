"""The command line: ``tidemark NOUN VERB``. Results go to stdout (``--output json`` for programs), everything else to stderr.

    main      defines the app and the top-level commands, and prints errors
    common    holds what the commands share: options, consoles, connections
    check     implements `consumers check` and `sink ddl`
    consume   implements `consume`
    validate  implements `validate`
    backfill  implements `backfill`
    offsets   implements `offsets`
    groups    implements `groups`
    assign    implements `assign`
    flow      implements `pause`, `resume` and `flow`
    audit     implements `audit`
    maintain  implements `maintain`
    rewind    defines `rewind` and `seek`
    retries   defines `retries`
    redrive   defines `redrive`
    local     defines `local`

Exit status: 0 success, 1 refused or failed, 2 wrong usage.
"""
