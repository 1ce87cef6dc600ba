"""Matching two clouds of tokens: tensors in, losses out. Knows nothing of models."""
