"""Runs SGLang's own checks of a server's arguments."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from tests.lab.engine_rehearsal.requests import Change

_COLOR = re.compile(r"\x1b\[[\d;]*m")
# Filled in for every server, and of no interest to a reader
_BORING = frozenset({"tokenizer_path", "served_model_name", "cuda_graph_config"})


class LogLines(logging.Handler):
    """Keeps what SGLang logs at the level of information and above."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage().strip()
        self.lines.append(line)
        if record.levelno >= logging.WARNING:
            self.warnings.append(line)


class ArgumentsRefused(Exception):
    """SGLang's parser refuses the command line."""


def parse(arguments: Sequence[str], lines: LogLines) -> Any:
    """SGLang's arguments, not yet resolved. lines: gets what the parser says of old options.

    Raises `ArgumentsRefused` with the parser's reason.
    """
    from sglang.srt.server_args import prepare_server_args

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            result = prepare_server_args(list(arguments))
    except SystemExit as end:
        text = errors.getvalue().strip()
        reason = text.splitlines()[-1].partition("error: ")[2] if text else ""
        raise ArgumentsRefused(reason or text or f"exit code {end.code}") from end
    lines.lines += [_COLOR.sub("", line) for line in errors.getvalue().splitlines() if line]
    return result


def option_names() -> list[str]:
    """Every option that SGLang's parser knows."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return sorted(name for action in parser._actions for name in action.option_strings)


def resolve(arguments: Any) -> tuple[dict[str, Any], list[Change], dict[str, str]]:
    """(the final settings, what SGLang changes of them, the environment variables that it sets)."""
    environment = dict(os.environ)
    arguments.resolve_once()
    settings = arguments.resolved_dict()
    changes = [
        Change(name=name, before=str(before), after=str(settings[name]))
        for name, before in arguments._raw_input.items()
        if name not in _BORING
        and not name.startswith("_")
        and name in settings
        and str(before) != str(settings[name])
    ]
    variables = {
        name: value for name, value in os.environ.items() if environment.get(name) != value
    }
    return settings, changes, variables
