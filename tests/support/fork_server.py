"""What the process imports that `tests.support.forks.FORKS` forks. Nothing else imports it."""

from megatron_rl.mcore import compat

# As in a rank, before Megatron is imported
compat.install()

import gc

import megatron_rl.run.build_worker
import tests.support.policies  # noqa: F401

# The garbage collection of a fork would copy the memory that it shares with the others
gc.collect()
gc.freeze()
