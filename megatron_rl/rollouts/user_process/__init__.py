"""User-defined scorers and environments in processes of their own, which can be killed.

`UserClasses` (collector) calls a `RemoteClass`, which has a `ServingProcess` that starts, watches
(`ProcessWatch`) and replaces a `UserProcess`. `__main__.py` and `server.py` run in that process.

The collector holds one process for each class. The class is constructed once in it. Calls and
results are MessagePack with typed decoding. An environment sees a proxy of its episode: tokens and
the rollout itself never leave the collector.
"""
