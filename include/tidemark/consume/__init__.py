"""One bounded run of a consumer: claim, plan, read, transform, commit.

    launch.py (command line, Airflow)  --starts-->  spark_jobs/consume.py  --runs-->  run.ConsumerRun  --batches-->  an Engine
                     |                                                                  |
                     +------------- follows the attempt's row in Postgres -------------+

If the driver dies, nothing is half done: what its tasks committed stays, nothing else was written, and the next attempt continues there.

Modules::

    change        Debezium's change data: the rows in its envelopes
    arrow_values  the values of Arrow arrays as Python's
    check         finds every problem of a consumer before it runs
    claims        the partitions that an attempt holds: claim, release, loss
    connect_json  values of JSON that Kafka Connect has written
    convert       values in the types of a table's columns
    decode        finds the schemas that keys and values need
    describe      the columns that a transform returns, found without reading a record
    drained       the task for a slice of a retry topic
    engine        what turns a batch of slices into committed slices
    evolve        adds the columns that a table lacks
    extent        how far a run reads, and when it ends
    fields        consumers without code: fields become columns
    fixed         the partitions of a run without group management
    forms         what a transform makes of records
    json_fields   fields of JSON in the types of a table's columns
    json_text     decoded values as JSON
    keeper        has a resident process start the driver
    latest        the latest records of topics, to look at
    launch        starts a driver and follows its attempt's row
    lookup        the topics, logs and ends that a run reads
    membership    how a run gets its partitions: manual assignment or group membership
    messages      Kafka's messages as Arrow batches
    nested        where arrays of arrays have a value of some kind
    plain         values of transforms in Python's own types
    process       a child process that never outlives its parent
    renamed       refuses to read what another group has loaded
    run           the steps of a run
    sample        columns for JSON, by sampled records
    sketch        a consumer to start from, by what its topic holds
    trial         what a consumer would make of the latest records
    watch         cancels a batch in flight when a rewind moves its partitions
    work          the task for a slice: read, transform, commit
"""
