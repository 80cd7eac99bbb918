"""A value that a rehearsal cannot know is refused by name, as the documentation says."""

from launch.rehearsal.cuda_guard import RehearsalUnavailable
from megatron_rl.contracts.exit_codes import ExitCode, Failure


def test_a_value_that_depends_on_weights_ends_the_command_with_code_2() -> None:
    """The command prints each `Failure` without a traceback, and ends with its code."""
    assert issubclass(RehearsalUnavailable, Failure)
    assert RehearsalUnavailable("there").exit_code is ExitCode.REFUSED
