"""Compares the assignors with Kafka's own. ``assignor_cases.json`` has the inputs and outputs of Kafka's tests, verified by running them.

``python -m tests.conformance FILE`` runs any file in that format. It prints a line for each failure, then ``N passed, N failed``.
"""
