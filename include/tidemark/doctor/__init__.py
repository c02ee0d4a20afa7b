"""``tidemark doctor``: problems that will make runs fail or lose records, each with its fix.

Modules::

    finding          a result: OK, WARNING or FAILURE
    versions         Python, Java and the packages of this environment
    tried            the versions that were tried, from the results of the matrix
    database         Postgres: reachable, writable, current, the role's profiles, its clock, timeouts, sessions, and data past its retention
    topic_checks     Kafka: every broker reachable; replicas, and retention against the lag, of a consumer's topics
    executors        the same servers from Spark's executors
    cluster_manager  YARN or Kubernetes, if drivers run there: takes applications, in this queue
    examine          the whole examination, with the checks of `tidemark consumers check` for each consumer

The examination changes nothing. A server that does not answer is a finding, not an error; checks that need it are omitted.
"""
