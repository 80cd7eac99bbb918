"""SGLang server processes: command line, start, readiness, supervision and shutdown."""
