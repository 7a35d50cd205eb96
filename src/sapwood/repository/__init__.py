"""What a model repository is on disk: names, manifests, a catalog, and packs of tensors.

This is the part that knows bytes and no torch: the engine of checkpoints uses it, too. Modules and
tensors are the business of ``sapwood.store``, which stands on it.
"""
