"""Accounts for every record of a slice exactly once (I3), and gives every row its lineage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tidemark.records.outcome import (
    ABSENT,
    DELETED,
    DETAIL,
    GIVEN,
    ONLY,
    OPTIONAL,
    BadOutput,
    Disposition,
    RecordCounts,
    Reject,
    TransformOutput,
    only,
    reject,
    row_offsets,
    skipping,
    without,
)
from tidemark.records.ranges import Slice
from tidemark.sink.table import Layout
from tidemark.sink.types import fits
from tidemark.spec.model import Deletes

if TYPE_CHECKING:
    import pyarrow as pa


def split_output(batch: pa.RecordBatch, part: Slice) -> TransformOutput:
    """Splits a transform's output by its ``disposition`` column. Without that column everything is loaded."""
    import pyarrow.compute as pc

    names = batch.schema.names
    missing = [name for name in GIVEN if name not in names]
    if missing:
        raise BadOutput(part=part, problem=f"the output lacks the lineage columns {', '.join(missing)}.")
    rows = batch.drop_columns([name for name in OPTIONAL if name in names])
    if "disposition" not in names:
        return TransformOutput(only(rows))
    words = dispositions(batch, part)
    skipped = row_offsets(batch.filter(pc.equal(words, "skip")), part).tolist()
    not_loaded = pc.or_(pc.equal(words, "retry"), pc.equal(words, "fail"))
    rejects = []
    if pc.any(not_loaded).as_py():
        refused = batch.filter(not_loaded)
        refused_words, texts = words.filter(not_loaded).to_pylist(), errors(refused, part).to_pylist()
        for offset, word, text in zip(row_offsets(refused, part).tolist(), refused_words, texts, strict=True):
            rejects.append(reject(offset, Disposition[word.upper()], text))
    deletes = pc.equal(words, "delete")
    if pc.any(deletes).as_py():
        rows = rows.append_column(DELETED, deletes)
    return TransformOutput(only(rows.filter(pc.or_(deletes, pc.equal(words, "load")))), skipped, rejects)


def dispositions(batch: pa.RecordBatch, part: Slice) -> pa.Array:
    """Returns the rows' dispositions as words (default: ``load``). Raises `BadOutput` for an unknown word."""
    import pyarrow.compute as pc

    if "disposition" not in batch.schema.names:
        return pc.fill_null(_nulls(batch.num_rows), "load")
    words = pc.fill_null(_text(batch, "disposition", part), "load")
    valid = [*(disposition.name.lower() for disposition in Disposition if disposition is not Disposition.HELD), "delete"]
    if not set(pc.unique(words).to_pylist()) <= set(valid):  # not quoted: it may be a record's value
        raise BadOutput(part=part, problem=f"a row's disposition is not one of {', '.join(valid)}.")
    return words


def errors(batch: pa.RecordBatch, part: Slice) -> pa.Array:
    """Returns the rows' ``error`` column; nulls if there is none."""
    return _text(batch, "error", part) if "error" in batch.schema.names else _nulls(batch.num_rows)


def data_columns(rows: pa.RecordBatch, layout: Layout, part: Slice) -> list[pa.Array]:
    """Returns the rows' data in COPY order. Raises `BadOutput` if the columns differ from the transform's earlier output."""
    arrays = []
    for column in layout.columns:
        if column.name not in rows.schema.names:
            raise BadOutput(part=part, problem=f"the output lacks column {column.name}, which it had before.")
        values = rows.column(column.name)
        if not fits(values.type, column.type):
            raise BadOutput(part=part, problem=f"column {column.name} has type {values.type}; the table has {column.type}.")
        arrays.append(values)
    extra = sorted(set(rows.schema.names) - {column.name for column in layout.columns} - {*GIVEN, *OPTIONAL, DELETED, ABSENT})
    if extra:
        raise BadOutput(part=part, problem=f"the output has a column that the table lacks: {extra[0]}.")
    return arrays


def wrong_deletes(rows: pa.RecordBatch, deletes: pa.Array, layout: Layout) -> tuple[pa.Array, str, str] | None:
    """Finds invalid deletes: a mask of ``rows``, with the type and text of their records' error. ``deletes``: mask of deleting rows."""
    import pyarrow.compute as pc

    if layout.deletes is Deletes.REFUSE:
        fix = "set sink.deletes to hard or soft" if layout.key else "only an upsert sink has rows to delete"
        return (deletes, "DeleteRefused", f"The record deletes a row, which the sink refuses: {fix}.") if pc.any(deletes).as_py() else None
    for name in layout.key:
        if name not in rows.schema.names:  # `data_columns` refuses the rows
            continue
        nulls = pc.and_(deletes, rows.column(name).is_null())
        if pc.any(nulls).as_py():
            return nulls, "DeleteWithoutKey", f"The record deletes a row, but its {name} is null: return the key's columns."
    return None


class Tally:
    """Accounts for the records of one slice, output by output. Needs five bytes of memory per offset of the slice, and four for each sink.

    ``suppressed``: offsets of records that are skipped, whatever the transform returned. ``refused``: records whose rows the sink rejected
    in an earlier pass over the slice.
    """

    def __init__(self, part: Slice, suppressed: Set[int] = frozenset(), refused: Mapping[int, Reject] = MappingProxyType({})) -> None:
        import numpy as np

        self._part = part
        self._suppressed = suppressed
        self._dispositions = np.zeros(self._size, dtype=np.uint8)
        self._rows: dict[str, Any] = {}
        self._deleted = np.zeros(self._size, dtype=np.int32)
        self.rejects: dict[int, Reject] = dict(refused)
        self.refused: dict[int, Reject] = dict(refused)
        """Records that fail, or are retried, because of their rows, not because of the transform."""
        self.partial: set[int] = set()
        """Refused records with rows in another sink, which may be stored already."""
        for offset, refusal in refused.items():
            self._dispositions[self._indexes_of(np.array([offset]))] = refusal.disposition

    @property
    def _size(self) -> int:
        """The number of offsets to account for."""
        return self._part.span

    def _indexes_of(self, offsets: Any) -> Any:
        """Returns the array indexes of these offsets. Raises `BadOutput` for an offset that was not read."""
        index = offsets - self._part.start
        if len(index) and (index.min() < 0 or index.max() >= self._part.span):
            outside = offsets[(index < 0) | (index >= self._part.span)][0]
            raise BadOutput(part=self._part, problem=f"kafka_offset {outside} is outside the range that was read.")
        return index

    def _offsets_at(self, index: Any) -> Any:
        """Returns the offsets at these array indexes."""
        return index + self._part.start

    def take(self, output: TransformOutput, layout: Layout) -> pa.RecordBatch | None:
        """Accounts for an output and returns its rows for one sink, if any, with `Layout.copy_columns` and maybe `ABSENT`.

        With several sinks, take all outputs for the first one, then all for the next. Raises `BadOutput` for a row of another partition,
        an offset outside the slice, or a record with two dispositions.
        """
        import numpy as np

        if self._suppressed:
            output = skipping(output, self._suppressed, self._part)
        if self.refused:
            output = without(output, self.refused, self._part)
        output = self._without_invalid_deletes(output, layout)
        for reject_ in output.rejects:
            self._mark(np.array([reject_.offset]), reject_.disposition)
            self.rejects[reject_.offset] = reject_
        if output.skipped:
            self._mark(np.asarray(output.skipped, dtype=np.int64), Disposition.SKIP)
        rows = output.rows.get(layout.sink)
        if rows is None or rows.num_rows == 0:
            return None
        index = self._mark(row_offsets(rows, self._part), Disposition.LOAD)
        if DELETED in rows.schema.names:
            np.add.at(self._deleted, index[rows.column(DELETED).to_numpy(zero_copy_only=False)], 1)
        return self._with_lineage(rows, layout, index, self._number(index, layout))

    def refuse(self, refusal: Reject, rows: int, sink: str = ONLY) -> None:
        """Marks a record as failed, or for retry, because its ``rows`` for a sink were rejected."""
        import numpy as np

        offset = refusal.offset
        index = int(self._indexes_of(np.array([offset]))[0])
        if sink in self._rows and self._rows[sink][index] != rows:
            cause = refusal.error_text.partition(DETAIL)[0]
            problem = f"rows of record {offset} were rejected ({cause}), but its other rows came separately: return them together."
            raise BadOutput(part=self._part, problem=problem)
        if any(written[index] for name, written in self._rows.items() if name != sink):
            self.partial.add(offset)
        self._dispositions[index] = refusal.disposition
        self._deleted[index] = 0
        for written in self._rows.values():
            written[index] = 0
        self.rejects[offset] = self.refused[offset] = refusal

    def counts(self) -> RecordCounts:
        """Counts the offsets by outcome so far. Offsets without an outcome are unaccounted."""
        import numpy as np

        totals = np.bincount(self._dispositions, minlength=len(Disposition) + 1)
        return RecordCounts(
            loaded=int(totals[Disposition.LOAD]),
            skipped=int(totals[Disposition.SKIP]),
            retried=int(totals[Disposition.RETRY] + totals[Disposition.HELD]),
            failed=int(totals[Disposition.FAIL]),
            unaccounted=int(totals[0]),
            sink_rows=sum(int(rows.sum()) for rows in self._rows.values()),
            deleted=int(self._deleted.sum()),
        )

    def held(self) -> int:
        """Counts the retried records that are held because an earlier record of their key is waiting."""
        return int((self._dispositions == Disposition.HELD).sum())

    def _without_invalid_deletes(self, output: TransformOutput, layout: Layout) -> TransformOutput:
        """Fails the records with an invalid delete, and returns the output without them."""
        while (rows := output.rows.get(layout.sink)) is not None and DELETED in rows.schema.names:
            wrong = wrong_deletes(rows, rows.column(DELETED), layout)
            if wrong is None:
                break
            mask, error_type, text = wrong
            offsets = sorted(set(row_offsets(rows.filter(mask), self._part).tolist()))
            output = without(output, offsets, self._part)
            for offset in offsets:
                self.refuse(reject(offset, Disposition.FAIL, text, error_type), 0, layout.sink)
        return output

    def _mark(self, offsets: Any, disposition: Disposition) -> Any:
        index = self._indexes_of(offsets)
        before = self._dispositions[index]
        clash = (before != 0) & (before != disposition)
        if clash.any():
            word = Disposition(int(before[clash][0])).name.lower()
            raise BadOutput(
                part=self._part,
                problem=f"record {offsets[clash][0]} has rows with dispositions {word} and {disposition.name.lower()}: give all the same.",
            )
        self._dispositions[index] = disposition
        return index

    def _number(self, index: Any, layout: Layout) -> Any:
        """Numbers each row among its record's rows for this sink, in order of arrival."""
        import numpy as np

        rows = self._rows.setdefault(layout.sink, np.zeros(self._size, dtype=np.int32))
        if (index[1:] > index[:-1]).all():
            numbers = rows[index]
            rows[index] += 1
            return numbers
        order = np.argsort(index, kind="stable")
        ordered = index[order]
        first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        rank = np.arange(len(ordered)) - np.maximum.accumulate(np.where(first, np.arange(len(ordered)), 0))
        numbers = np.empty(len(index), dtype=np.int32)
        numbers[order] = rows[ordered] + rank
        np.add.at(rows, index, 1)
        return numbers

    def _with_lineage(self, rows: pa.RecordBatch, layout: Layout, index: Any, numbers: Any) -> pa.RecordBatch:
        import numpy as np
        import pyarrow as pa

        arrays = data_columns(rows, layout, self._part)
        count = rows.num_rows
        arrays += [
            pa.array(np.full(count, self._part.topic_id, dtype=np.int16)),
            pa.array(np.full(count, self._part.partition.partition, dtype=np.int32)),
            pa.array(self._offsets_at(index).astype(np.int64)),
            pa.array(numbers.astype(np.int32)),
        ]
        if layout.deletes is not Deletes.REFUSE:
            arrays.append(rows.column(DELETED) if DELETED in rows.schema.names else pa.array(np.zeros(count, dtype=bool)))
        names = [name for name, _ in layout.copy_columns]
        if ABSENT in rows.schema.names:
            arrays.append(rows.column(ABSENT))
            names.append(ABSENT)
        return pa.RecordBatch.from_arrays(arrays, names=names)


def by_absent(rows: pa.RecordBatch, layout: Layout) -> Iterator[tuple[tuple[str, ...], pa.RecordBatch]]:
    """Groups rows in COPY form by the columns that they have no value for. These columns stay, as nulls."""
    import numpy as np
    import pyarrow.compute as pc

    if ABSENT not in rows.schema.names:
        yield (), rows
        return
    kinds, rows = rows.column(ABSENT).fill_null(b"").dictionary_encode(), rows.drop_columns([ABSENT])
    for number, bits in enumerate(kinds.dictionary.to_pylist() or [b""]):
        absent = np.unpackbits(np.frombuffer(bits, np.uint8)).tolist()
        names = tuple(name for name, is_absent in zip(layout.with_default, absent, strict=False) if is_absent)
        yield names, rows.filter(pc.equal(kinds.indices, number))


def _text(batch: pa.RecordBatch, name: str, part: Slice) -> pa.Array:
    import pyarrow as pa

    column = batch.column(name)
    if not fits(column.type, "text"):
        raise BadOutput(part=part, problem=f"{name} has type {column.type}; it must be text.")
    return column.cast(pa.string())


def _nulls(count: int) -> Any:
    import pyarrow as pa

    return pa.nulls(count, pa.string())
