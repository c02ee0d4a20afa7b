// A table that becomes a list of cards where there is no room for columns.

import { Box, Button, Flex, Fragment, Muted, h, number, useEffect, useRef, useState } from "./base.js";

const { Table } = globalThis.ChakraUI;
const NARROW_PX = 720;
const PART = 50; // a thousand rows take seconds to draw, at every key that is typed into a search

function useNarrow() {
  const place = useRef(null);
  const [narrow, setNarrow] = useState(globalThis.innerWidth < NARROW_PX);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => setNarrow(entry.contentRect.width < NARROW_PX));
    watch.observe(place.current);
    return () => watch.disconnect();
  }, []);
  return [place, narrow];
}

// columns: {name, cell: (row) => node, end: is a number}. details: a second line of a row, or nothing. first: the rows drawn at first.
export function Rows({ rows, first = PART, ...shape }) {
  const [place, narrow] = useNarrow();
  const [most, setMost] = useState(first);
  return h(Box, { ref: place, minW: 0 }, h(narrow ? Cards : Grid, { rows: rows.slice(0, most), ...shape }),
    rows.length > most && h(Flex, { mt: 2, gap: 3, align: "center" },
      h(Button, { size: "sm", variant: "outline", onClick: () => setMost(most + PART) }, "Show more"), h(Muted, null, `${number(most)} of ${number(rows.length)}`)));
}

const Grid = ({ columns, rows, id, label, details }) =>
  h(Box, { overflowX: "auto", borderWidth: "1px", borderRadius: "md" },
    h(Table.Root, { size: "sm", "aria-label": label },
      h(Table.Header, null, h(Table.Row, null, columns.map((column) =>
        h(Table.ColumnHeader, { key: column.name, textAlign: column.end ? "end" : "start", whiteSpace: "nowrap" }, column.name)))),
      h(Table.Body, null, rows.map((row) => h(Fragment, { key: id(row) },
        h(Table.Row, null, columns.map((column) =>
          h(Table.Cell, { key: column.name, textAlign: column.end ? "end" : "start", fontVariantNumeric: "tabular-nums", verticalAlign: "top" },
            column.cell(row)))),
        details?.(row) && h(Table.Row, null, h(Table.Cell, { colSpan: columns.length, pt: 0 }, details(row))))))));

const Cards = ({ columns, rows, id, label, details }) =>
  h(Box, { role: "list", "aria-label": label, display: "grid", gap: 3, gridTemplateColumns: "minmax(0, 1fr)" }, rows.map((row) =>
    h(Box, { key: id(row), role: "listitem", borderWidth: "1px", borderRadius: "md", p: 3, fontSize: "sm" },
      columns.map((column, index) => {
        const value = column.cell(row);
        if (value === null || value === undefined || value === false || value === "" || value === "–") return null;
        return h(Box, { key: column.name, display: "grid", gridTemplateColumns: index ? "7.5rem minmax(0, 1fr)" : "minmax(0, 1fr)", gap: 2, mb: 1 },
          index > 0 && h(Box, { color: "fg.muted" }, column.name),
          h(Box, { fontWeight: index ? "normal" : "semibold", overflowWrap: "anywhere" }, value));
      }),
      details?.(row))));
