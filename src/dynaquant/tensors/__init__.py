"""Tensors in memory: codebooks, the forms in which a checkpoint stores a tensor, their values and hashes."""
