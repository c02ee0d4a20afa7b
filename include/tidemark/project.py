"""The locations of a user's project and of the files shipped with Tidemark.

The project is one folder with the user's consumers, transforms, expectations and schemas, located by `root`. ``TIDEMARK_CONSUMERS``,
``TIDEMARK_TRANSFORMS``, ``TIDEMARK_EXPECTATIONS``, ``TIDEMARK_SCHEMAS`` and ``TIDEMARK_STATE`` each override the folder of one part.

Tidemark's own files (migrations, the driver's entry point, the files of `tidemark init`) always come with the library, never from the
project, which may have a folder ``sql`` of its own.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

_SHIPPED = Path(__file__).resolve().parent / "_project"
_CHECKOUT = Path(__file__).resolve().parents[2]

CONSUMERS = "include/consumers"
"""The folder that identifies a project."""


def root() -> Path:
    """The project folder: ``TIDEMARK_HOME``; else the current folder or ``AIRFLOW_HOME``, whichever has ``include/consumers``; else the
    current folder."""
    home = os.environ.get("TIDEMARK_HOME")
    if home:
        return Path(home).resolve()
    here, airflow = Path.cwd(), os.environ.get("AIRFLOW_HOME")
    if airflow and not (here / CONSUMERS).is_dir() and (Path(airflow) / CONSUMERS).is_dir():
        return Path(airflow).resolve()
    return here


def shipped(name: str) -> Path:
    """A file or folder shipped with Tidemark: beside the library in a wheel, in the checkout for an editable install."""
    return (_SHIPPED if _SHIPPED.is_dir() else _CHECKOUT) / name


def migrations() -> Path:
    return shipped("sql")


def consume_job() -> Path:
    """The one entry point that the command line, Airflow and spark-submit start."""
    return shipped("spark_jobs/consume.py")


def transforms() -> Path:
    return _folder("TIDEMARK_TRANSFORMS", "spark_jobs/transforms")


def consumers() -> Path:
    return _folder("TIDEMARK_CONSUMERS", CONSUMERS)


def expectations() -> Path:
    return _folder("TIDEMARK_EXPECTATIONS", "include/expectations")


def schemas() -> Path:
    return _folder("TIDEMARK_SCHEMAS", "include/schemas")


def state() -> Path:
    """The embedded stack's data folder: ``.tidemark`` in the project unless ``TIDEMARK_STATE`` names another one."""
    return _folder("TIDEMARK_STATE", ".tidemark")


def files_below(folder: Path, pattern: str = "*") -> list[Path]:
    """The files below a folder, sorted, without dangling links, such as the locks of editors. The folder may be missing."""
    return sorted(path for path in folder.rglob(pattern) if path.is_file())


def own_tmp() -> Path:
    """A private folder for temporary files: ``tidemark-UID`` in the temporary folder. Raises `PermissionError` if somebody else created
    it."""
    folder = Path(tempfile.gettempdir()) / f"tidemark-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        info = folder.lstat()
    except OSError as error:  # a file, or a link that leads nowhere
        raise PermissionError(f"{folder} cannot be created ({error.strerror})") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


def _folder(variable: str, default: str) -> Path:
    path = os.environ.get(variable)
    return Path(path).resolve() if path else root() / default
