"""What alignment costs: whole steps, growth, each loss alone, peers and inference, measured side by side in one run."""
