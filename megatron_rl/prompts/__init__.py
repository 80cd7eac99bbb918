"""Where prompts come from: JSONL files, embedded tasks and reasoning-gym's generators behind one interface.

Invariant: prompts are validated here and trusted afterwards; no question is on both sides of the train/held-out split.
Importing this package imports nothing, so that a refused configuration can name a task without waiting for numpy.
"""
