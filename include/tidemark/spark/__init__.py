"""The interface to Spark. Executors import it, so it is installed with the library. No module below it imports it.

- `session` starts a driver's Spark session; `archive` and `build_archive` speed up its JVM's start.
- `engine` runs a batch as one Spark job; `plan` checks whether the tasks of a plan may commit on their own.
- `arrow` controls the size of the batches that the JVM passes to Python; `errors` translates Spark's errors.
"""
