"""The parts of the benchmark, and what their tables are called."""

PARTS = {
    "step": "Whole training steps",
    "length": "Each loss and its backward, by length",
    "layers": "Whole training steps, by layers",
    "sinkhorn": "Sinkhorn, at equal marginal error",
    "inference": "Evaluation, attached",
}
