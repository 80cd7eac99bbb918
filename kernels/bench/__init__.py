"""Speed and memory of the kernels beside the peers that are installed.

Run it from `kernels/`. It prints a table and writes a JSON file under bench/results/.

    python -m bench
    python -m bench --device cuda    # with the sizes of a GPU
    python -m bench --compiled       # the machine code for GPUs, without one
"""
