"""Metadata of an installed stenolog, as pip writes it."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any


def write_metadata(folder: Path, direct_url: dict[str, Any] | None = None) -> Path:
    """Write the metadata into a folder for `sys.path`, and return the folder.

    pip writes `direct_url.json` for a package that does not come from an index.
    """
    info = folder / f"stenolog-{version('stenolog')}.dist-info"
    info.mkdir(parents=True)
    fields = f"Metadata-Version: 2.4\nName: stenolog\nVersion: {version('stenolog')}\n"
    (info / "METADATA").write_text(fields)
    if direct_url is not None:
        (info / "direct_url.json").write_text(json.dumps(direct_url))
    return folder
