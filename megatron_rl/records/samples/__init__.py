"""The samples of a run: responses with their verdicts and the values of each token, in files."""
