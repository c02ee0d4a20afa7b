"""Java and the jars: finds the ``java`` for Spark, the broker and Ivy, and downloads the jars of Spark's connector and of Kafka once.

Modules::

    errors    errors for missing or unusable requirements
    jars      the cache of the jars that `ivy.xml` lists
    java      finds and checks `java`
"""
