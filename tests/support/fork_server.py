"""Imports of the process whose forks `tests.support.forks` makes. Nothing else imports this."""

from megatron_rl.mcore import compat

# As in a rank, before Megatron is imported
compat.install()

import gc

import tests.support.policies  # noqa: F401

# The garbage collection of a fork would copy the memory that it shares with the others
gc.collect()
gc.freeze()
