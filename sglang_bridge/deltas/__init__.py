"""Weight sync over a disk, where only the bytes that changed travel.

The trainer writes one directory for each push. On every node with engines, a copy of the last
weights is rebuilt from it, verified, and loaded by the engines of the node.
"""
