"""One file a family: what its checkpoints are called and where it differs from the others.

Every module here is imported by the registry, so a new family needs no line elsewhere.
"""
