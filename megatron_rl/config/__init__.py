"""The configuration: its typed schema, its rules, and the messages that refuse a bad one.

Every process of a run uses it. No module here imports torch.
"""
