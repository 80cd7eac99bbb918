"""Runs commands as the user of the tests, or as another one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OTHER_ID = 23456
# The interpreter may lie in a home folder. A mount namespace makes it visible to the other user,
# and changes nothing for this one.
_SHOW_INTERPRETER = """
set -e
prefix=$1; shift
home=/$(echo "$prefix" | cut -d / -f 2)
if [ "$home" = /root ]; then
  place=$(mktemp -d)
  mount --bind "$prefix" "$place"
  mount -t tmpfs -o mode=755 tmpfs /root
  mkdir -p -m 755 "$prefix"
  mount --bind "$place" "$prefix"
  umount "$place"
  rmdir "$place"
fi
exec setpriv --reuid=$0 --regid=$0 --clear-groups "$@"
"""


def run_as(user: str, *arguments: str, timeout: float = 280) -> str:
    """Run this interpreter with some arguments, and return its output.

    user: `own`, or `other` for another user than root. The test is skipped if it is that already.
    """
    command = [sys.executable, *arguments]
    if user == "other":
        if os.geteuid() != 0:
            pytest.skip("the tests do not run as root, but as another user already")
        unshare = ["unshare", "--mount", "--propagation", "private"]
        shell = ["sh", "-c", _SHOW_INTERPRETER, str(OTHER_ID), sys.base_prefix]
        command = [*unshare, *shell, *command]
    process = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )
    if process.returncode != 0 and "unshare:" in process.stderr:
        pytest.skip(f"root may not make namespaces here: {process.stderr.strip()}")
    assert process.returncode == 0, process.stderr
    return process.stdout


def make_folder(user: str) -> tempfile.TemporaryDirectory[str]:
    """Make a folder that the user can reach, unlike those of pytest."""
    folder = tempfile.TemporaryDirectory(prefix="sandbox-")
    if user == "other":
        os.chown(folder.name, OTHER_ID, OTHER_ID)
    return folder
