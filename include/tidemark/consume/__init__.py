"""One bounded run of a consumer: claim, plan, read, transform, commit.

    driver/launch.py (command line, Airflow)  --starts-->  spark_jobs/consume.py  --runs-->  run.ConsumerRun  --batches-->  an Engine
                     |                                                                         |
                     +---------------- follows the attempt's row in Postgres -----------------+

If the driver dies, nothing is half done: the commits of its tasks stay, nothing else was written, and the next attempt continues there.

Modules::

    assignment    the partitions of a run without group management
    batch         the engine, and how a run executes a batch
    claims        claims, releases and drops partitions
    evolve        adds the columns that a table lacks
    extent        how far a run reads, and when it ends
    lookup        the topics, logs and ends that a run reads
    membership    how a run gets its partitions: manual assignment or group membership
    renamed       refuses records that another group has loaded
    rewind_watch  cancels a batch in flight when a rewind moves its partitions
    run           the steps of a run
"""
