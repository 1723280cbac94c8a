"""Whether this machine lets a process make namespaces: asked of another program than the one under test."""

import shutil
import subprocess

import pytest

MADE = ["unshare", "--user", "--mount", "--pid", "--net", "--fork", "true"]
POSSIBLE = shutil.which("unshare") is not None and subprocess.run(MADE, capture_output=True).returncode == 0
needs_namespaces = pytest.mark.skipif(not POSSIBLE, reason="user namespaces cannot be made on this machine")
