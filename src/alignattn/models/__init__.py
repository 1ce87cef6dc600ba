"""What the experiments train."""
