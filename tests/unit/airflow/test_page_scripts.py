"""The page's scripts, which no build step checks."""

from __future__ import annotations

import json
import re
from graphlib import TopologicalSorter

from tidemark import project
from tidemark.airflow.web.app import STATIC


def test_scripts_import_what_others_export_and_never_in_a_circle() -> None:
    texts = {script.name: script.read_text(encoding="utf-8") for script in STATIC.iterdir()}
    imports = {name: re.findall(r'import \{([^}]*)\} from "\./(\w+\.js)";', text) for name, text in texts.items()}
    for name, of_script in imports.items():
        for names, source in of_script:
            words = [word.strip() for word in names.split(",")]
            exports = set(re.findall(r"\w+", " ".join(re.findall(r"^export (.*)", texts[source], re.MULTILINE))))
            assert (name, source, set(words) - exports) == (name, source, set())
            assert [word for word in words if len(re.findall(rf"\b{word}\b", texts[name])) < 2] == [], f"not used in {name}"
    order = [*TopologicalSorter({name: [source for _, source in of_script] for name, of_script in imports.items()}).static_order()]
    assert (order[0], order[-1]) == ("base.js", "app.js")


def test_terms_of_the_page_are_those_of_the_glossary() -> None:
    lines = (
        line.strip("| ").split(" | ", 1) for line in (project.root() / "docs" / "glossary.md").read_text().splitlines() if line[:2] == "| "
    )
    glossary = [[term, re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", meaning)] for term, meaning in lines if term != "term"]
    script = STATIC.joinpath("terms.js").read_text(encoding="utf-8")
    assert [json.loads(line) for line in re.findall(r"^  (\[.*\]),$", script, re.MULTILINE)] == glossary
