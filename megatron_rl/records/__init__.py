"""The files and progress lines of one run: its directory, metrics and exit record.

Rank 0 writes most of them. `launch/report.py` reads them.
"""
