"""A plugin of pytest that writes the names of the kernels that Triton's interpreter runs.

ESPO_LAUNCH_LOG names the file. A line has the test and the kernel.
"""

from __future__ import annotations

import os
from typing import Any

from triton.runtime.interpreter import InterpretedFunction

_function: Any = InterpretedFunction
_run = _function.run


def _log_and_run(self: Any, *args: Any, **options: Any) -> Any:
    with open(os.environ["ESPO_LAUNCH_LOG"], "a") as file:
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]  # without "(call)"
        file.write(f"{test} {self.fn.__name__}\n")
    return _run(self, *args, **options)


_function.run = _log_and_run
