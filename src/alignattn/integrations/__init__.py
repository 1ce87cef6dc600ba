"""Alignment inside the training stacks that people use: the Trainer of transformers, and Lightning."""
