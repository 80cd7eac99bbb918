"""Failures that a test expects."""

import pytest

from megatron_rl.contracts.exit_codes import ExitCode, Failure


def fails(code: ExitCode, match: str | None = None) -> pytest.RaisesExc[Failure]:
    """Expect a `Failure` with this exit code. match: as of `pytest.raises`."""
    return pytest.raises(Failure, match=match, check=lambda failure: failure.exit_code == code)
