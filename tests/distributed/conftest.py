"""Prepares Megatron as a rank does, before a test imports it.

Without it torch's compiler is imported, too.
"""

from megatron_rl.mcore import compat

compat.install()
