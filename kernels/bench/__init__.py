"""Speed and memory of the kernels beside the peers that are installed.

Invariant: every number is measured in the run that writes it, beside the copy bandwidth of the same run, and every
implementation's result is compared with ours before it is timed.

    python -m bench                      from `kernels/`: a table on the terminal, a JSON file under bench/results/
    python -m bench --device cuda        the sizes of a GPU
"""
