// Tidemark's page. Airflow imports this module and renders globalThis.AirflowPlugin.

import { A, Box, Empty, Flex, HOME, RouterLink, h, to, useEffect, useLocation, useState, zone } from "./base.js";
import { Audit } from "./audit.js";
import { Form } from "./form.js";
import { Group } from "./group.js";
import { Groups } from "./groups.js";
import { FailedRecord } from "./payload.js";
import { Retries, RetriesEverywhere } from "./retries.js";
import { Rewind, Rewinds } from "./rewinds.js";
import { Source } from "./source.js";
import { Terms } from "./terms.js";
import { Validation, Validations } from "./validations.js";

const TABS = [["groups", "Groups"], ["rewinds", "Rewinds"], ["retries", "Retries"], ["validations", "Validations"], ["audit", "Audit"], ["terms", "Terms"]];

// Each view has an address of its own, so that a reload and a link keep it.
function view([name = "groups", consumer, id]) {
  if (name === "groups") {
    if (!consumer) return h(Groups);
    if (["rewind", "redrive", "discard"].includes(id)) return h(Form, { kind: id, consumer, key: `${id} ${consumer}` });
    if (id === "transform") return h(Source, { consumer, key: consumer });
    return id ? null : h(Group, { consumer, key: consumer });
  }
  if (name === "rewinds") return id ? h(Rewind, { consumer, id }) : h(Rewinds);
  if (name === "retries") return id ? h(FailedRecord, { consumer, id }) : consumer ? h(Retries, { consumer, key: consumer }) : h(RetriesEverywhere);
  if (name === "validations") return id ? h(Validation, { consumer, id }) : h(Validations);
  if (name === "audit") return h(Audit);
  if (name === "terms") return h(Terms);
  return null;
}

const ZONE_MS = 1000;

function App() {
  const { pathname } = useLocation();
  const [, setShown] = useState(zone());
  useEffect(() => { // the user's choice of a time zone redraws Airflow, but no page of a plugin
    const timer = setInterval(() => setShown(zone()), ZONE_MS);
    return () => clearInterval(timer);
  }, []);
  const parts = pathname.slice(pathname.indexOf(HOME) + HOME.length).split("/").filter(Boolean).map(decodeURIComponent);
  const current = parts[0] ?? "groups";
  return h(Box, { p: { base: 2, md: 4 }, minW: 0, w: "100%", h: "100%", overflowY: "auto", overflowX: "hidden" },
    h(Flex, { as: "nav", "aria-label": "Tidemark", gap: 1, mb: 4, wrap: "wrap", borderBottomWidth: "1px" }, TABS.map(([name, words]) =>
      h(Box, { key: name, asChild: true, px: 3, py: 2, fontSize: "sm", fontWeight: name === current ? "semibold" : "normal", color: name === current ? "fg" : "fg.muted",
        borderBottomWidth: "2px", borderColor: name === current ? "fg.info" : "transparent", mb: "-1px" },
      h(RouterLink, { to: to(name), "aria-current": name === current ? "page" : undefined }, words)))),
    h(Box, { as: "main", minW: 0 }, view(parts) ?? h(Empty, { title: "There is no such page" }, h(A, { to: to("groups") }, "Groups"))));
}

globalThis.AirflowPlugin = App;
export default App;
