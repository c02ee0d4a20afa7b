"""The edge to Spark: a session, the check of a plan, and the engine that runs a batch as one Spark job.

Installed with the library, because executors import it. Nothing below knows it.
"""
