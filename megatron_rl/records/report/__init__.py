"""One HTML page about one or several runs. `launch/report.py` writes it."""
