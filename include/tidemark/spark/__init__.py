"""The interface to Spark. Executors import it, so it is installed with the library. No module below it imports it.

Modules::

    arrow          limits the batches that the JVM passes to Python
    build_archive  builds the class-data archive
    class_archive  the class-data archive for fast JVM starts
    daemon         PySpark's daemon, with Tidemark imported
    engine         runs a batch as one Spark job
    errors         translates Spark's errors into Tidemark's
    keeper         forks drivers, starts and ends the shared application
    query_plan     checks that a plan keeps each Kafka partition in one task
    releases       what differs between the releases of PySpark
    session        the driver's Spark session
    shared         a driver's session in the application that small runs share
"""
