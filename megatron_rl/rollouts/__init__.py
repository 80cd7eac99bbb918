"""Rollouts from the engines of every node.

Collector processes run episodes and keep the rollouts; rank 0 requests groups and receives them.
"""
