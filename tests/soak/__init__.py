"""A soak: producers, consumers and random faults for minutes, then a checker that reports in Jepsen's words.

    python -m tests.soak --minutes 30 [--seed N]

```
 producers ──▶ Kafka ──▶ consumers: run after run, each a driver of its own ──▶ Postgres ──▶ watcher: a snapshot a second
     │            ▲              ▲                                                 ▲               │
     │            └───────── faults, all chosen from the seed ─────────────────────┘               ▼
     └──── what each record became: committed, aborted, not known ─────────────────────────────▶ checker
```

`history` says what is known, `checker` what is wrong with it: both are pure. `plan` makes the faults of a seed, `faults` strikes them.
`producers` (with `doomed`, a producer that is killed), `consumers` and `watch` act; `run` puts them together and `report` tells.
Threads race, so a seed gives the same faults in the same order with the same waits, and not the same interleaving.
"""
