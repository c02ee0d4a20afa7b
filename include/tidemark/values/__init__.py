"""Converts values to columns, for consumers without code and for the output of transforms.

Modules::

    arrow_values  values of Arrow arrays in Python, and searches of nested arrays
    connect_json  values of JSON from Kafka Connect
    conversion    the table of conversions: values in the types of a table's columns
    debezium      change data: the rows in Debezium's envelopes
    fields        consumers without code: fields become columns
    json_fields   fields of JSON in the types of a table's columns
    json_text     decoded values as JSON
    plain         values of transforms in plain Python types
"""
