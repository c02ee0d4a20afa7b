"""A soak: producers, consumers and random faults for minutes, then a checker that reports in Jepsen's terms.

    python -m tests.soak --minutes 30 [--seed N]

```
 producers ──▶ Kafka ──▶ consumers: run after run, each a separate driver ────▶ Postgres ──▶ watcher: one snapshot per second
     │            ▲              ▲                                                 ▲               │
     │            └───────── faults, all chosen from the seed ─────────────────────┘               ▼
     └──── outcome of each record: committed, aborted, unknown ────────────────────────────────▶ checker
```

`history` contains what is known, and `checker` finds what is wrong with it; both are pure. `plan` creates the faults of a seed, and
`faults` injects them. `producers` (with `doomed`, a producer that is killed), `consumers` and `watch` act; `run` combines them, and
`report` prints the result. Threads race, so a seed gives the same faults in the same order with the same waits, but not the same
interleaving.
"""
