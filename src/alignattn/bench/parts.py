"""The parts of the benchmark, and what their tables are called."""

PARTS = {
    "work": "What a step has to do",
    "step": "Whole training steps",
    "length": "Each loss and its backward, by length",
    "layers": "Whole training steps, by layers",
    "sinkhorn": "Sinkhorn, at equal marginal error",
    "subsets": "Fewer tokens or layers a step",
    "inference": "Evaluation, attached",
}

LONG_PARTS = ("layers", "subsets")  # left out if it is to be quick
