"""A program: a producer with one open transaction, which will be killed. It reports its progress on stdout, one JSON document per line.

First ``placed``, with the offsets of its records. Then either ``open``, after which it does nothing, or ``committing``, after which it
commits and reports ``committed``. Its argument is a JSON list: settings, ``[[topic, partition, first value, count], ...]``, commit or not.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from confluent_kafka import Message, Producer

from tidemark.driver.process import die_with_parent

LIMIT_S = 20


def main() -> None:
    die_with_parent()
    settings, send, commit = json.loads(sys.argv[1])
    placed: list[tuple[str, int, int, int]] = []

    def delivered(error: Any, message: Message) -> None:
        if error is None:
            placed.append((str(message.topic()), message.partition() or 0, message.offset() or 0, int(message.value() or b"")))

    producer = Producer({"linger.ms": 5, "log_level": 0, **settings})
    producer.init_transactions(LIMIT_S)
    producer.begin_transaction()
    for topic, partition, first, count in send:
        for value in range(first, first + count):
            producer.produce(topic, value=str(value), partition=partition, on_delivery=delivered)
    producer.flush(LIMIT_S)
    say("placed", placed)
    if commit:
        say("committing")
        producer.commit_transaction(LIMIT_S)
        say("committed")
    else:
        say("open")
    sys.stdin.read()  # until it is killed, or its parent has ended


def say(what: str, more: object = None) -> None:
    sys.stdout.write(json.dumps([what, more]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
