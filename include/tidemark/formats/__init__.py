"""Decodes keys and values: from Kafka's bytes to text, JSON, Avro or Protobuf, the same way for all forms of a transform.

A datum that cannot be decoded fails only its own record. If a worker meets a schema that the driver has not sent, `SchemasMissing` returns
to the driver, which fetches it from the registry; the slice is then read again.

Modules::

    avro      Avro data as Arrow arrays
    connect   the meaning of Kafka Connect's and Debezium's types
    decoder   keys and values of a batch; travels to the workers with the schemas that they need
    limits    time and size limits for requests to an HTTP server
    memory    how much memory decoding takes
    protobuf  Protobuf data as Arrow arrays
    registry  client of the schema registry, used by the driver only
    schema    Avro schemas as trees
    shape     decoded arrays in types that Spark, Python and Postgres share, and in the reader's schema
    wire      schema ids, which Confluent's serializers write before a datum or into a header
"""
