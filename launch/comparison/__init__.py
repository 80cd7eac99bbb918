"""Many runs side by side: what is asked for, how it is trained, and which settings a search finds
best.
"""
