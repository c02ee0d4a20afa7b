"""The edge to Spark: a session, the check of a plan, and the engine that runs a batch as one Spark job.

Installed with the library, because executors import it. Nothing below knows it.

Modules::

    archive    the class-data archive for fast JVM starts
    arrow      the size of the batches that the JVM hands to Python
    engine     a batch as one Spark job
    plan       checks that a plan keeps each Kafka partition in one task
    session    the driver's Spark session
"""
