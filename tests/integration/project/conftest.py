"""The installed wheel, which the tests of the wheel and those of the pages share."""

from __future__ import annotations

import pytest
from tests.support.installed import Installed, install


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(tmp_path_factory.mktemp("installed"))
