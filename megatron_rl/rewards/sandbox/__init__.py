"""The sandbox in which programs of a model run, one process for each of them.

A program starts under bubblewrap in namespaces of its own (`launchers.py`, `bubblewrap.py`) with a
seccomp filter (`seccomp.py`), in a control group where possible (`control_groups.py`). The first
code there (`bootstrap.py`) limits the process, with Landlock too, before it runs the program.
"""

from megatron_rl.rewards.sandbox.limits import Ending, Limits, ProgramResult
from megatron_rl.rewards.sandbox.sandbox import Isolation, Sandbox

__all__ = ["Ending", "Isolation", "Limits", "ProgramResult", "Sandbox"]
