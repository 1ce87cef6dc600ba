"""Experiments: recipe ─▶ runner ─▶ result files ─▶ compare."""
