"""Processes that are forks of one process which has imported Megatron. Importing takes seconds."""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.fork_server"])
