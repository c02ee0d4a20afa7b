"""Parses what operators type, and formats what they read. Pure functions; knows neither Kafka nor Postgres.

duration  parses and formats durations such as `5m`
moment    parses and formats times and ISO 8601 durations
problems  collects all problems of an input, and checks reasons
wording   quotes, escapes and counts
"""
