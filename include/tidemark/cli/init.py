"""``tidemark init``: writes a new project from the files that Tidemark ships."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from tidemark import project
from tidemark.cli.common import Output, OutputFormat, print_json, print_note
from tidemark.errors import Refused

PARTS = {
    "template": ".",
    "dags": "dags",
    "plugins": "plugins",
    "docker": "docker",
    "docker-compose.yaml": "docker-compose.yaml",
    ".env.example": ".env.example",
}
"""Files and folders to copy, with their places in the project. All but ``template`` are those of Tidemark's own repository."""


class FolderNotEmpty(Refused):
    """A project is written into a new or an empty folder only."""

    folder: Path

    def __str__(self) -> str:
        return f"{self.folder} is not an empty folder. Nothing was written; name a new or an empty one."


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or an empty folder.")], output: Output = OutputFormat.TABLE
) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FolderNotEmpty(folder=folder)
    for part, place in PARTS.items():
        source, target = project.shipped(part), folder / place
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    print_note("\n".join(f"wrote {folder / file}" for file in files))
    if output is OutputFormat.JSON:
        print_json({"folder": str(folder.resolve()), "files": files})
    else:
        print_note(f"Next: the commands in {folder / 'README.md'}")
