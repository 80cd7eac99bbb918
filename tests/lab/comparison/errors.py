"""Exit codes and messages of commands that continue when they are run again."""

from __future__ import annotations

import sys
from collections.abc import Callable

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from sglang_bridge.errors import EngineError


def exit_code_of(work: Callable[[], int]) -> int:
    """Run `work` and return its exit code.

    Expected errors are printed to standard error without a traceback.
    """
    try:
        return work()
    except (Failure, EngineError) as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    except OSError as error:
        file = error.filename or "a file in --out"  # A full disk names no file.
        print(
            f"{file} cannot be written: {error.strerror}. Run the same command again to continue",
            file=sys.stderr,
        )
        return ExitCode.CANNOT_WRITE
    except KeyboardInterrupt:
        print("\ninterrupted. Run the same command again to continue", file=sys.stderr)
        return ExitCode.INTERRUPTED
