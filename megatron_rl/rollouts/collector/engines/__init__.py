"""The collector's engines behind one `generate`: which one gets a request, and what is repeated."""
