"""One bounded run of a consumer: claim, plan, read, transform, commit.

    launch.py (command line, Airflow)  --starts-->  spark_jobs/consume.py  --runs-->  run.Run  --batches-->  an Engine
                     |                                                                  |
                     +------------- follows the attempt's row in Postgres -------------+

`run` holds a run's steps and keeps I1 to I5 together; an `Engine` (in `tidemark.spark`) turns a batch of slices into tasks;
`work` is what a task does in the Arrow and function forms; `launch` starts the driver and sees that it never outlives its parent.
If the driver dies, nothing is half done: what its tasks committed is committed, the rest was never there, the next attempt goes on.
"""
