"""Speed and memory of the kernels beside the peers that are installed.

python -m bench                      from `kernels/`: a table on the terminal, a JSON file under
bench/results/ python -m bench --device cuda        the sizes of a GPU
"""
