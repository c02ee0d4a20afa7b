"""Triggers.

Modules::

    due      the asset and the trigger that start drains when records are due
    polling  how triggers ask the consumers' databases
"""
