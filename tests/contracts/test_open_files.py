"""The limit of open files of collectors and ranks."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
_, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard_limit), hard_limit))
{call}
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard_limit, hard_limit)
"""
LIMIT = (
    "from megatron_rl.contracts.open_files import raise_open_file_limit; raise_open_file_limit()"
)
JOIN = """
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.mcore.job import join
join(ParallelSettings())
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", [LIMIT, JOIN], ids=["function", "rank"])
def test_limit_of_open_files_is_raised_to_the_hard_limit(call: str) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT.format(call=call)], check=True, timeout=120)
