"""How a command ends that goes on where it was when it is called again."""

from __future__ import annotations

import sys
from collections.abc import Callable

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from sglang_bridge.errors import EngineError


def ended(work: Callable[[], int]) -> int:
    """The exit code of `work`, or of what it raised, which is told on stderr without a traceback."""
    try:
        return work()
    except (Failure, EngineError) as refused:
        print(refused, file=sys.stderr)
        return refused.exit_code
    except OSError as error:
        file = error.filename or "a file in --out"  # a full disk names none
        print(
            f"{file} cannot be written: {error.strerror}. The same command goes on here",
            file=sys.stderr,
        )
        return ExitCode.CANNOT_WRITE
    except KeyboardInterrupt:
        print("\ninterrupted. The same command goes on here", file=sys.stderr)
        return ExitCode.INTERRUPTED
