"""A run of a consumer: claim, plan, read, transform, commit.

    launch.py (command line, Airflow)  --starts-->  spark_jobs/consume.py  --runs-->  run.consume  --batches-->  an Engine
                     |                                                                  |
                     +------------- follows the attempt's row in Postgres -------------+

An `Engine` (in `tidemark.spark`) turns a batch of slices into tasks. `launch` makes sure that the driver never outlives its parent.
If the driver dies, nothing is half done: what its tasks committed is committed, the rest was never there, the next attempt goes on.

Modules::

    check       finds every problem of a consumer before it runs
    claims      the partitions that an attempt holds: claim, release, loss
    describe    the columns that a transform returns, found without reading a record
    drained     the task for a slice of a retry topic
    fixed       the partitions of a run without group management
    launch      starts a driver and follows its attempt's row
    process     a child process that never outlives its parent
    run         the steps of a run
    seat        how a run gets its partitions: by manual assignment or as a group member
    told        cancels a batch in flight when a rewind moves its partitions
    window      how far a run reads, and when it ends
    work        the task for a slice: read, transform, commit
"""
