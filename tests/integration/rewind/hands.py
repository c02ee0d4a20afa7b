"""A consumer that the product runs. The tests themselves begin, read and swap its replays beside."""

from __future__ import annotations

import functools
from typing import Any

from tests.support.by_hand import ByHand
from tests.support.records import numbers
from tests.support.scenario import Scenario as Consumer

from tidemark.quality import check_conservation, suite_files, unjudged, validate
from tidemark.rewind.plan_model import Plan

WITH_SUFFIX = """
    from typing import TypedDict

    from tidemark.transform import Fail, Record, Retry


    class Row(TypedDict):
        payload: str


    def transform(record: Record) -> Row:
        value = record.value.decode().removeprefix("record ")
        if int(value) % 10 == 1:
            raise Retry("not yet")
        if int(value) % 10 == 2:
            raise Fail("never")
        return Row(payload=value + "{suffix}")
"""


class Hands(ByHand):
    """A consumer that the product runs, with the steps of its replays beside."""

    def __init__(self, consumer: Consumer, **keys: Any) -> None:
        self.topic = consumer.feed(numbers(0, 30), self.source("a"), "payload text, number bigint GENERATED ALWAYS AS IDENTITY", **keys)
        super().__init__(consumer)

    def source(self, suffix: str) -> str:
        return WITH_SUFFIX.replace("{suffix}", suffix)

    def check(self) -> None:
        with self.watch.cursor() as cur:
            assert check_conservation(cur, self.group, [self.table]) == []

    def validate(self) -> None:
        """Judges what no validation has judged."""
        with self.session() as connection:
            runs = unjudged(connection, self.group)
        for each in runs:
            validate(self.url, each.run, group=self.group, suites=suite_files(self.spec))

    def failed(self) -> list[Any]:
        columns = "partition, record_offset, state, error_text, retry_topic"
        group = "SELECT group_id FROM tidemark.consumer_group WHERE name = %s"
        return self.sql(f"SELECT {columns} FROM tidemark.failed_record WHERE group_id = ({group}) ORDER BY 1, 2", self.group)

    def catch_up_and_swap(self, rewind_id: int) -> Plan:
        return self.swap(rewind_id, functools.partial(self.consumer.run, of_rewind=rewind_id)).plan
