// The file of a consumer's transform.

import { A, Box, Code, Loaded, Muted, Title, api, h, to, useData, useEffect, useRef } from "./base.js";

export const Source = ({ consumer }) => {
  const state = useData(api("groups", consumer, "transform"), { refresh: false });
  return h(Box, null,
    h(Title, { text: `Transform of ${consumer}` }, h(A, { to: to("groups", consumer) }, "Group")),
    h(Loaded, { state }, (data) => h(View, { data })));
};

function View({ data }) {
  const here = useRef(null);
  useEffect(() => here.current?.scrollIntoView({ block: "center" }), [data]);
  return h(Box, { mt: 2 }, h(Code, null, data.transform), h(Muted, null, ` ${data.file}${data.line ? `, line ${data.line}` : ""}, as it is on the api-server now`),
    h(Box, { as: "pre", tabIndex: 0, "aria-label": data.file, fontSize: "xs", overflowX: "auto", p: 3, bg: "bg.muted", borderRadius: "md", mt: 2 },
      data.text.split("\n").map((line, index) => h(Box, { key: index, ref: index + 1 === data.line ? here : undefined, bg: index + 1 === data.line ? "bg.info" : undefined },
        h(Box, { as: "span", color: "fg.muted", userSelect: "none", display: "inline-block", w: "3rem" }, index + 1), line))));
}
