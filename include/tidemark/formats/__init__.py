"""Decodes keys and values: from Kafka's bytes to text, JSON, Avro or Protobuf, the same way for all forms of a transform.

A datum that cannot be decoded concerns its record only, which fails. If a worker meets a schema that the driver has not sent,
`SchemasMissing` goes back to the driver; it asks the registry, and the slice is read again.

Modules::

    avro      Avro data as Arrow arrays
    connect   what Kafka Connect's and Debezium's types stand for
    decoder   keys and values of a batch; travels to the workers with the schemas that they need
    limits    what a question to an HTTP server may take
    memory    how much memory decoding takes
    protobuf  Protobuf data as Arrow arrays
    registry  the schema registry, as the driver asks it; workers never do
    schema    Avro schemas as trees
    shape     decoded arrays in types that Spark, Python and Postgres have, and in the reader's schema
    wire      the schema's id, which Confluent's serializers write before a datum or into a header
"""
