"""Compiles the library of `tidemark.native` into the wheel. Without a C compiler, the wheel has no library and fits every machine."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("include", "tidemark", "native")


class CustomBuildHook(BuildHookInterface):
    """Gives the wheel the tag of the library's machine. An editable install compiles at first use instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._folder = Path(tempfile.mkdtemp())
        if version == "editable":
            return
        native = Path(self.root) / NATIVE
        spec = importlib.util.spec_from_file_location("build", native / "build.py")
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            library = build.compile_into(self._folder, {name: (native / name).read_bytes() for name in build.SOURCES})
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"the wheel has no compiled code: {error}")
            return
        if tag := build.wheel_tag(library):
            build_data |= {"tag": tag, "pure_python": False}
            build_data["force_include"][str(library)] = str(Path(*NATIVE.parts[1:], library.name))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self._folder)
