"""Asynchronous, sharded checkpoints of a run on several tiers (DeepFreeze)."""
