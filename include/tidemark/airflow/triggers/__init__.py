"""Triggers.

Modules::

    attempt  wakes a task whose driver is on a cluster
    due      the asset and the trigger that start drains when records are due
    polling  how triggers ask the consumers' databases
"""
