"""``tidemark doctor``: what will make runs fail, or lose records, each with its fix.

Modules::

    finding       a result: OK, WARNING or FAILURE, and how errors become one
    versions      Python, Java and the packages of this environment
    database      Postgres: reachable, writable, current, the role's profiles, its clock, timeouts, sessions, and data past its retention
    topic_checks  Kafka: every broker reachable; replicas, retention against the lag, retry topics of a consumer
    executors     the same servers as seen from Spark's executors
    examine       all of it

The examination changes nothing. A server that does not answer is a finding, not an error, and what needs it is not examined.
"""
