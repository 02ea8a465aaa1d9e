"""Runs a command in a Linux namespace."""

import subprocess

import pytest

from support import needs


def in_namespace(*options: str) -> list[str]:
    """Return the command that starts another one in its own namespace."""
    needs.tool("unshare")
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", *options]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"NOT RUN (kernel): no namespaces here: {tried.stderr.strip()}")
    return command
