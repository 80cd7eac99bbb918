"""The process of a node's collector: runs episodes on engines and keeps the rollouts."""
