"""The command line: ``tidemark NOUN VERB``. Results go to stdout (``--output json`` for programs), everything else to stderr.

Exit status: 0 success, 1 refused or failed, 2 wrong usage.

Modules::

    assign      `tidemark assign`
    audit       `tidemark audit`
    audit_log   `tidemark audit-log`
    backfill    `tidemark backfill`
    common      options and output of all commands
    completion  the names that a shell completes
    consume     `tidemark consume`
    consumers   `tidemark consumers`
    doctor      `tidemark doctor`
    erase       `tidemark erase`
    explain     `tidemark explain`
    flow        `tidemark pause`, `resume` and `flow`
    groups      `tidemark groups`
    init        `tidemark init`
    lag         `tidemark lag`
    local       `tidemark local`
    main        the commands, and how errors are reported
    maintain    `tidemark maintain`
    metrics     `tidemark metrics`
    migrate     `tidemark migrate`
    offsets     `tidemark offsets`
    redrive     `tidemark redrive`
    retries     `tidemark retries`
    rewind      `tidemark rewind`, `tidemark seek` and `tidemark groups adopt`
    servers     sessions with Postgres, and the Kafka cluster
    sink        `tidemark sink`
    spark       a small Spark session
    trial       `tidemark try`
    validate    `tidemark validate`
"""
