"""Scenarios: the targets of rewinds.

Modules::

    offsets_file  reads offsets from CSV
    scenario      parses and describes scenarios, with Kafka's names
    targets       resolves the target offset of each partition
"""
