"""Readers of files of questions: Parquet files, data set folders, and the rows of all formats."""
