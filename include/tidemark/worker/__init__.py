"""What a Spark task does with a slice: read, decode, transform, commit.

Modules::

    batches         Kafka's messages as Arrow batches
    call_transform  calls the transform and checks its output
    decoding        finds the schemas of keys and values
    retry_slice     the task for a slice of a retry topic
    slice_worker    the task for a slice of any other topic
"""
