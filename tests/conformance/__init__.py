"""The assignors against facts about Kafka's own: inputs and outputs of its tests, executed there, in ``assignor_cases.json``.

``python -m tests.conformance FILE`` runs any file of that format: a line for each failure, then ``N passed, N failed``.
"""
