"""Everything the trainer needs from Megatron-Core.

Invariant: only this package (and the tests) import `megatron.core`; plain parameters come in, no configuration objects.
Importing this package imports neither torch nor Megatron.
"""
