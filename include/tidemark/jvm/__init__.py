"""Java and the jars: finds the ``java`` for Spark, the broker and Ivy, and fetches the jars of Spark's connector and of Kafka once.

Modules::

    errors    what can be missing or unusable
    jars      the cache of the jars that `ivy.xml` lists
    java      finds and checks `java`
"""
