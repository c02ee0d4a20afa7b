"""The page as an Airflow plugin: found once, through its file or the installed library, and cheap to load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tidemark import project

LOAD = """
import json
from airflow import plugins_manager
plugins, errors = plugins_manager._get_plugins()
apps = [each["url_prefix"] for each in plugins_manager.get_fastapi_plugins()[0]]
ours = [str(plugin.source).partition(":")[0] for plugin in plugins if plugin.name == "tidemark"]
import tidemark
print(json.dumps({"ours": ours, "errors": errors, "apps": apps, "tidemark": tidemark.__file__}))
"""


def run(program: str, home: Path, plugins: Path) -> str:
    """The last line that the program prints, in an Airflow with this folder of plugins."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "TIDEMARK"))} | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(plugins),
    }
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300, cwd=home)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_file_in_the_plugins_folder_is_found_once_and_leaves_the_library_alone(tmp_path: Path) -> None:
    """The file takes precedence over the installed library's entry point. A file `tidemark.py` would be imported as `tidemark`."""
    found = json.loads(run(LOAD, tmp_path, project.root() / "plugins"))
    assert (found["ours"], found["errors"], found["apps"]) == (["$PLUGINS_FOLDER/tidemark_plugin.py"], {}, ["/tidemark"])
    assert found["tidemark"] == str(project.root() / "include" / "tidemark" / "__init__.py")


def test_installed_library_shows_the_page_without_a_file(tmp_path: Path) -> None:
    found = json.loads(run(LOAD, tmp_path, tmp_path / "plugins"))
    assert (len(found["ours"]), found["errors"], found["apps"]) == (1, {}, ["/tidemark"])


def test_process_that_serves_no_page_does_not_import_it(tmp_path: Path) -> None:
    """Airflow loads plugins in every task; only the api-server asks for their apps."""
    program = "import sys, tidemark.airflow.plugin; print(sorted({'fastapi', 'tidemark.airflow.web', 'psycopg2'} & set(sys.modules)))"
    assert run(program, tmp_path, tmp_path / "plugins") == "[]"
