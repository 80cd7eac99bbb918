"""Rank 0: readers of files of questions.

They read Parquet files, data set folders, and rows of all formats.
"""
