"""One bounded run of a consumer: claim, plan, read, transform, commit.

    launch.py (command line, Airflow)  --starts-->  spark_jobs/consume.py  --runs-->  run.Run  --batches-->  an Engine
                     |                                                                  |
                     +------------- follows the attempt's row in Postgres -------------+

If the driver dies, nothing is half done: what its tasks committed stays, nothing else was written, and the next attempt continues there.

The caller's side:
- `launch` starts the driver and follows its attempt; `process` makes sure that the driver never outlives its parent.
- `check` finds mistakes in a consumer before it runs; `describe` finds out which columns a transform returns.

The driver:
- `run` holds the steps of a run and keeps I1 to I5 together.
- `extent` decides how far a run reads and when it ends; `lookup` finds the topics, logs and ends; `fixed` picks the partitions.
- `membership` gets the partitions, assigned manually or by the group; `claims` holds them; `watch` notices rewinds during a batch.
- `engine` defines the `Engine` protocol (implemented in `tidemark.spark`) and runs one batch with it.

The tasks of the Arrow and function forms:
- `work` reads, transforms and commits a slice; `drained` does the same for a slice of a retry topic.
- `forms` calls the transform and sorts its answers; `messages` turns Kafka's messages into Arrow batches.
"""
