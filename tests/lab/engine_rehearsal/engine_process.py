"""`python -m tests.lab.engine_rehearsal.engine_process REQUEST REPLY`.

It is a process of its own, because it changes torch for good.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import msgspec

from tests.lab.engine_rehearsal.engine_model import load_rank
from tests.lab.engine_rehearsal.gpu_answers import answer_as
from tests.lab.engine_rehearsal.requests import EngineReply, EngineRequest, RankLoad
from tests.lab.engine_rehearsal.server_arguments import (
    ArgumentsRefused,
    LogLines,
    option_names,
    parse,
    resolve,
)


def answer(request: EngineRequest) -> EngineReply:
    """Resolve the arguments and load the weights into every rank. Call `answer_as` first."""
    lines = LogLines()
    logger = logging.getLogger("sglang")
    logger.addHandler(lines)
    try:
        return _judge(request, lines)
    finally:
        logger.removeHandler(lines)


def _judge(request: EngineRequest, lines: LogLines) -> EngineReply:
    try:
        arguments = parse(request.arguments, lines)
    except ArgumentsRefused as refusal:
        return EngineReply(parser_error=str(refusal), option_names=option_names())
    try:
        settings, changes, variables = resolve(arguments)
    except Exception as error:  # SGLang asserts, and raises anything
        return EngineReply(
            resolution_error=f"{type(error).__name__}: {error}",
            option_names=option_names(),
            messages=lines.lines,
        )
    messages = list(lines.lines)
    return EngineReply(
        settings=msgspec.json.decode(msgspec.json.encode(settings, enc_hook=str)),
        changes=changes,
        environment=variables,
        option_names=option_names(),
        messages=messages,
        ranks=_load(request, arguments) if request.tensors else [],
    )


def _load(request: EngineRequest, arguments: Any) -> list[RankLoad]:
    if request.weight_arguments != request.arguments:
        arguments = parse(request.weight_arguments, LogLines())
        arguments.resolve_once()
    ranks = range(arguments.tp_size)
    return [load_rank(arguments, rank, request.tensors) for rank in ranks]


def main() -> None:
    """Read the request, and write the reply."""
    request = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineRequest)
    answer_as(request.gpu)
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(answer(request)))


if __name__ == "__main__":
    main()
