"""How a value becomes a column: of records that no code transforms, and of what a transform returns.

Modules::

    arrow_values  the values of Arrow arrays as Python's
    connect_json  values of JSON that Kafka Connect has written
    conversion    the table of conversions: values in the types of a table's columns
    debezium      change data: the rows in Debezium's envelopes
    fields        consumers without code: fields become columns
    json_fields   fields of JSON in the types of a table's columns
    json_text     decoded values as JSON
    nested        where arrays of arrays have a value of some kind
    plain         values of transforms in Python's own types
"""
