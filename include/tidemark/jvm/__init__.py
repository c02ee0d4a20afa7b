"""Java and the jars: which ``java`` runs Spark, the broker and Ivy, and the jars of Spark's connector and of Kafka, fetched once.

`java` finds and checks Java, `jars` keeps the cache of jars that ``ivy.xml`` lists, `errors` says what is missing and what to do.
"""
