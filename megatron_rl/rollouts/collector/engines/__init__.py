"""The collector's engines behind one `generate`."""
