"""Rules across values, one module per section of the configuration.

Invariant: every rule is a pure function of settings, the model's shape and the launch facts; it yields refusals.
"""
