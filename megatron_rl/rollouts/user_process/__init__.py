"""User-defined scorers and environments in processes of their own, which can be killed.

The collector holds one process for each class. The class is constructed once in it. Calls and
results are MessagePack with typed decoding. An environment sees a proxy of its episode: tokens and
the rollout itself never leave the collector.
"""
