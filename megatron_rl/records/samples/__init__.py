"""Files of samples: responses with their verdicts and the values of each token.

Rank 0 writes them, and `launch/report.py samples` reads them.
"""
