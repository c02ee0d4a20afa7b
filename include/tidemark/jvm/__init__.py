"""Java and the jars: finds the ``java`` for Spark, the broker and Ivy, and fetches the jars of Spark's connector and of Kafka once.

`java` finds and checks Java, `jars` caches the jars that ``ivy.xml`` lists, `errors` defines what can be missing or unusable.
"""
