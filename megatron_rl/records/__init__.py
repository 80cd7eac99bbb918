"""The files and progress lines of one run: its directory, metrics and exit record."""
