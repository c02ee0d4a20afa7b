"""``tidemark explain``: a consumer's file in sentences."""

from __future__ import annotations

import dataclasses

from tidemark import project
from tidemark.author.explanation import explanation_of
from tidemark.cli.common import Name, Output, OutputFormat, print_json, print_note, print_text, stdout
from tidemark.spec import SpecInvalid, find_consumer
from tidemark.spec.user_transform import load_transform


def explain(name: Name, output: Output = OutputFormat.TABLE) -> None:
    """Imports the transform for its form. If that fails, prints the reason to stderr and explains the rest."""
    spec, form = find_consumer(name), None
    if spec.transform is not None:
        try:
            form = load_transform(spec, [project.transforms()]).form
        except SpecInvalid as error:
            print_note(str(error), style="yellow")
    explanation = explanation_of(spec, form)
    if output is OutputFormat.JSON:
        print_json({"consumer": spec.name, "description": spec.description, "form": form, **dataclasses.asdict(explanation)})
        return
    print_text(f"{spec.name}: {spec.description}" if spec.description else spec.name, style="bold")
    headings = {"What it does": explanation.does, "What it guarantees": explanation.guarantees, "What it needs": explanation.needs}
    for heading, sentences in headings.items():
        stdout.print()
        print_text(heading, style="bold")
        for sentence in sentences:
            print_text(f"- {sentence}")
