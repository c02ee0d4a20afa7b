"""Reads a page as a newcomer does: runs its shell blocks in order, in one shell, and compares what they print with what the page shows.

A page has a *script*, a generator that prepares each block: it creates what the page assumes, then yields a word of the next block and, if
the block cannot run here as it stands, the words to replace. It gets back what the block has printed, including standard error. A block
that no script runs must be in `NOT_RUN`.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.documented import Block, missing_line, outputs, with_words
from tests.support.installed import Installed
from tidemark.jvm.jars import broker_jars
from tidemark.jvm.java import find_java

Step = tuple[str, Mapping[str, str]]
Script = Generator[Step, str, None]

TOOL = 'exec {java} -cp "{jars}/*" org.apache.kafka.tools.consumer.group.ConsumerGroupCommand "$@"\n'
"""Kafka's ``kafka-consumer-groups``."""

_MAKE = "these are the tests themselves, benchmarks, or what the other blocks start too"
_AIRFLOWS = "tests/integration/project/test_two_environments.py runs it, with three versions of Airflow"
NOT_RUN: dict[str, dict[str, str]] = {
    "CONTRIBUTING.md": {
        "make check": _MAKE,
        ".venv/bin/python -m pytest": _MAKE,
        ".venv/bin/tidemark local up": _MAKE,
        "TIDEMARK_TEST_POOLER": _MAKE,
    },
    "README.md": {
        "make demo": "tests/e2e/test_demo.py runs it",
        "make check": _MAKE,
        "make dist": _AIRFLOWS,
        "tidemark init\n": _AIRFLOWS,
    },
    "docs/benchmarks.md": {"# everything": _MAKE},
    "docs/deployment/airflow.md": {
        "python3.12 -m venv": "it needs a bucket on S3",
        "aws s3 cp": "it needs a bucket on S3",
    },
    "docs/deployment/index.md": {
        "wheel=": _AIRFLOWS,
        "python3.11 -m venv": "venv-pack is not installed here",
        "export ": "tests/unit/project/test_snippets.py reads the values with the product's code",
        "# Airflow's role": "tests/integration/roles/test_roles.py grants the profiles to roles of its own",
    },
    "docs/operating.md": {"tidemark metrics serve": "it does not end; tests/integration/metrics/test_prometheus.py reads its metrics"},
    "docs/security.md": {
        "airflow roles": "tests/e2e/test_teams.py runs it in an Airflow with FAB",
        "tidemark audit-log --after": "kcat is not installed here",
    },
    "template/README.md": {
        "": "tests/unit/project/test_snippets.py compares the blocks with the README's",
    },
}
"""The blocks that no script runs, by page and by how they begin, each with the reason."""


def reason(block: Block) -> str | None:
    """Why the block is not run, or `None`."""
    return next((why for start, why in NOT_RUN.get(block.page, {}).items() if block.code.startswith(start)), None)


@dataclass(frozen=True)
class PageReader:
    """A shell that keeps its folder and its exported variables from block to block. It starts in ``folder``, as in a checkout, and the
    project is beside it."""

    installed: Installed
    folder: Path
    env: Mapping[str, str]

    def __post_init__(self) -> None:
        (self.folder / "bin").mkdir(parents=True)
        tool = self.folder / "bin" / "kafka-consumer-groups"
        tool.write_text("#!/bin/sh\n" + TOOL.format(java=find_java(), jars=broker_jars()[0].parent))
        tool.chmod(0o755)

    @property
    def project(self) -> Path:
        return self.folder.parent / "lake"

    def consumer(self, name: str) -> Path:
        return self.project / "include" / "consumers" / f"{name}.yaml"

    def transform(self, name: str) -> Path:
        return self.project / "spark_jobs" / "transforms" / f"{name}.py"

    def run(self, code: str) -> tuple[str, str]:
        """What the shell prints for these commands, and its standard error."""
        shell, path = self.folder / "shell", os.pathsep.join([str(self.folder / "bin"), str(self.installed.bin), os.environ["PATH"]])
        lines = [f"! [ -e {shell} ] || . {shell}", code, f"{{ export -p; printf 'cd %q\\n' \"$PWD\"; }} > {shell}"]
        done = self.installed.run("bash", "-euo", "pipefail", "-c", "\n".join(lines), cwd=self.folder, **{"PATH": path, **self.env})
        return done.stdout, done.stderr

    def read(self, page: str, script: Script, *, whole: bool = True) -> None:
        """Runs the blocks of the page. Unless ``whole``, stops at the end of the script."""
        printed: str | None = None
        for block, shown in outputs(page).items():
            if reason(block):
                continue
            step = _next(script, printed)
            if step is None:
                assert not whole, f"{block}: its script has no step for it. Add one, or add the block to NOT_RUN, with the reason"
                return
            word, instead = step
            assert word in block.code, f"{block} is not the block with {word!r}"
            output, errors = self.run(with_words(block.code, instead))
            printed = output + errors
            missing = missing_line(shown, output)
            assert missing is None, f"{block}: the page shows a line that is not printed: {missing}\n{printed}"
        assert _next(script, printed) is None, f"{page}: its script has more steps than the page has blocks"


def _next(script: Script, printed: str | None) -> Step | None:
    try:
        return next(script) if printed is None else script.send(printed)
    except StopIteration:
        return None
