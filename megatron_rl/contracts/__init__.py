"""Typed records that modules and processes exchange, used in every process of a run.

No module here imports torch.
"""
