"""What the documentation gives to copy, as the tests run it."""

from __future__ import annotations

import re
from pathlib import Path

from tidemark import project


def grants(page: str) -> list[str]:
    """The blocks of SQL on a page of ``docs/`` that grant something, in their order; in deployment.md the schema's, then a sink's."""
    text = (Path(project.root()) / "docs" / page).read_text()
    return [block for block in re.findall(r"^```sql\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if "GRANT" in block]
