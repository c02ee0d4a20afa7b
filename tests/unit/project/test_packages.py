"""Which packages an installation has: few without extras, and an error that names the extra for each that is missing."""

from __future__ import annotations

import importlib
import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tidemark.packages import EXTRAS, ExtraMissing, optional, require

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
HEAVY = {"pyspark", "pandas", "great_expectations", "grpcio-tools", "datafusion", "ptars", "pyarrow", "numpy", "authlib"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s\[<>=!~;]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


@pytest.mark.parametrize("extra", EXTRAS)
def test_modules_of_an_extra_come_from_its_requirements(extra: str) -> None:
    required = names(PROJECT["optional-dependencies"][extra])
    for module in EXTRAS[extra]:
        top = packages_distributions().get(module.partition(".")[0], [])
        assert {name.lower().replace("_", "-") for name in top} & required or module in ("airflow", "openlineage"), module


def test_core_brings_nothing_heavy() -> None:
    assert names(PROJECT["dependencies"]) & {name.replace("_", "-") for name in HEAVY} == set()


def test_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "avro", ("not_installed", "fastavro"))
    with pytest.raises(ExtraMissing, match=r"not_installed is not installed\. .* pip install 'tidemark-kafka\[avro\]'"):
        require(["driver", "avro"])
    with pytest.raises(ExtraMissing, match="extra avro"), optional():
        importlib.import_module("not_installed.part")
    with pytest.raises(ModuleNotFoundError, match="another_one"), optional():  # a transform's own import
        importlib.import_module("another_one")
    with pytest.raises(ModuleNotFoundError, match="google"), optional():  # it shares only its first name with Protobuf's package
        importlib.import_module("google.not_installed")
    require(["driver", "protobuf", "registry", "quality"])
