from typing import TypedDict

from tidemark.transform import Fail, Record


class City(TypedDict):
    name: str
    population: int


def transform(record: Record) -> City | None:
    city = record.json()
    if city is None:
        return None  # a tombstone: counted as skipped
    if "name" not in city:
        raise Fail("no name")  # kept in tidemark.failed_record, with the reason
    return {"name": city["name"], "population": city["population"]}
