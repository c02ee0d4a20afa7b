"""Where a rewind goes.

Modules::

    offsets_file  offsets from CSV or JSON
    scenario      scenarios with Kafka's names, from text and to text
    targets       the target offset of each partition
"""
