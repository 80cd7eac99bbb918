"""One run from its configuration to its exit code."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.mcore.cpu import compat


def run(configuration: Configuration) -> int:
    """Train. Returns an `ExitCode`."""
    compat.install()
    from megatron_rl.run.failures import (  # Megatron may only be imported after the line above
        Terminated,
        describe_failure,
    )
    from megatron_rl.run.rank import Rank

    with _terminable(Terminated):
        rank = Rank(configuration)
        code, reason = ExitCode.OK, "the run is complete"
        try:
            rank.run()
        except BaseException as error:
            known, reason = describe_failure(rank.better_reason(error))
            rank.abort(reason)
            if known is None:
                rank.report(1, reason)
                raise
            code = known
        finally:
            rank.close()
        rank.report(code, reason)
    if code is not ExitCode.OK and (rank.speaks or code is not ExitCode.PEER_FAILED):
        print(f"\n{reason}\n(exit code {int(code)}: {code.name.lower()})", file=sys.stderr, flush=True)
    return int(code)


@contextlib.contextmanager
def _terminable(signal_error: type[BaseException]) -> Iterator[None]:
    """SIGTERM becomes an exception, so that `finally` blocks run."""

    def handle(number: int, frame: object) -> None:
        for again in (signal.SIGTERM, signal.SIGINT):  # cleaning up is under way: a second signal must not cut it short
            signal.signal(again, signal.SIG_IGN)
        raise signal_error

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
