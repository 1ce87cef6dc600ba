"""When to stop, and which epoch to keep, by validation loss and accuracy: the rule of GAT's authors, seed by seed.

An epoch is *good* if its loss is no higher than the lowest before it, or its accuracy no lower than the highest before
it. After `patience` epochs in a row that are not good, training ends. What is kept, and tested, is the last epoch that
was good in both ways. (So ties count as good, and the one that is kept need not have the lowest loss of all.)
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class EarlyStopping:
    """Told loss and accuracy of every seed after each epoch; nothing waits for the device but the question `over`."""

    def __init__(self, seeds: int, patience: int, device: torch.device) -> None:
        self.patience = patience
        self.least_loss = torch.full((seeds,), math.inf, device=device, dtype=torch.float64)
        self.most_accurate = torch.full((seeds,), -math.inf, device=device, dtype=torch.float64)
        self.waited = torch.zeros(seeds, dtype=torch.long, device=device)
        self.kept = torch.zeros(seeds, dtype=torch.long, device=device)  # which epoch
        self.epochs = torch.zeros(seeds, dtype=torch.long, device=device)  # that were trained until it was over

    @property
    def over(self) -> Bool[Tensor, " s"]:
        """Which seeds are at their end."""
        return self.waited >= self.patience

    def look(self, epoch: int, loss: Float[Tensor, " s"], accuracy: Float[Tensor, " s"]) -> Bool[Tensor, " s"]:
        """Epoch 1, 2, ... is done: which seeds' weights are to be kept. Seeds that are over stay as they are."""
        running = ~self.over
        by_loss, by_accuracy = loss <= self.least_loss, accuracy >= self.most_accurate
        keep = by_loss & by_accuracy & running
        self.least_loss = torch.where(running, torch.fmin(self.least_loss, loss.double()), self.least_loss)
        self.most_accurate = torch.where(running, torch.fmax(self.most_accurate, accuracy.double()), self.most_accurate)
        self.waited = torch.where(running, torch.where(by_loss | by_accuracy, 0, self.waited + 1), self.waited)
        self.kept = torch.where(keep, epoch, self.kept)
        self.epochs = torch.where(running, epoch, self.epochs)
        return keep
