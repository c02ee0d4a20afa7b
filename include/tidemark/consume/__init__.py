"""One bounded run of a consumer: claim, plan, read, transform, commit.

    driver/launch.py (command line, Airflow)  --starts-->  spark_jobs/consume.py  --runs-->  run.ConsumerRun  --batches-->  an Engine
                     |                                                                         |
                     +---------------- follows the attempt's row in Postgres -----------------+

If the driver dies, nothing is half done: what its tasks committed stays, nothing else was written, and the next attempt continues there.

Modules::

    assignment    the partitions of a run without group management
    batch         what turns a batch of slices into committed slices
    claims        the partitions that an attempt holds: claim, release, loss
    evolve        adds the columns that a table lacks
    extent        how far a run reads, and when it ends
    lookup        the topics, logs and ends that a run reads
    membership    how a run gets its partitions: manual assignment or group membership
    renamed       refuses to read what another group has loaded
    rewind_watch  cancels a batch in flight when a rewind moves its partitions
    run           the steps of a run
"""
