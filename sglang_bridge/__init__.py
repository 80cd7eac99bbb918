"""Everything that speaks to SGLang: starting servers, asking for generations, sending weights,
auditing them.
"""
