"""Verification: the noise of the target's sampler, the walk down the tree, the KV moves."""
