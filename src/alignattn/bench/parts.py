"""The parts of the benchmark, and what their tables are called."""

PARTS = {
    "work": "What a step has to do",
    "step": "Whole training steps",
    "straightforward": "Whole training steps, as one would first write them",
    "device": "What the device does in a step",
    "python": "Whole training steps of next to no tokens: Python's part",
    "length": "Each loss and its backward, by length",
    "layers": "Whole training steps, by layers",
    "sinkhorn": "Sinkhorn, at equal marginal error",
    "subsets": "Fewer tokens or layers a step",
    "inference": "Evaluation, attached",
}

LONG_PARTS = ("device", "python", "layers", "subsets")  # left out if it is to be quick
ACCELERATED = ("device", "python")  # and on a CPU, which does both by itself
