"""Limit of a process's open files."""

from __future__ import annotations

import resource


def raise_open_file_limit() -> None:
    """Raise the limit of open files to the hard limit.

    Each connection is an open file. A collector has one for each request, and a rank one for each
    other rank in each gloo group. The usual limit of 1,024 is too low for hundreds of ranks.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
