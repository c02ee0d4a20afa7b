"""What operators type and read: times, durations, reasons, and how numbers and names are written.

`duration` and `moment` parse what people write, `problems` collects everything that is wrong with it, `wording` quotes, escapes and counts.
Pure functions; knows neither Kafka nor Postgres.
"""
