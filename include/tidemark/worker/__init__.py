"""What a Spark task does with a slice: read, decode, transform, commit.

Modules::

    batches         Kafka's messages as Arrow batches
    call_transform  calls the transform, and checks what it returns
    decoding        finds the schemas that keys and values need
    retry_slice     the task for a slice of a retry topic
    slice_worker    the task for a slice of any other topic
"""
