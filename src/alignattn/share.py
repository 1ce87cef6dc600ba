"""What part of one update a batch is, where a host accumulates gradients over several and divides by nothing itself.

The Trainer of transformers hands `num_items_in_batch`, the labels in all batches of an update (of all processes, whose
number it then multiplies the loss by), to every model whose forward takes it, and leaves it to the model to divide. So
does alignment: a sample counts by its labels, as in the task's loss, and what alignment adds to an update is the same
however the update is cut into batches.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def share_of_update(
    model: nn.Module, labels: Tensor, total: Tensor | int, shifted: Tensor | None = None
) -> Callable[[int], Tensor]:
    """From a number of samples to the weight of each; over all batches of the update the weights add up to one.

    `total` is the number of labels in all of them; `shifted` are the labels that the loss takes, if they were given.
    """
    if shifted is not None:
        labels = shifted
    elif _shifts_labels(model):
        labels = labels[..., 1:]
    items: Tensor = labels.ne(-100).reshape(len(labels), -1).sum(1).float()  # (b)
    share: Tensor = items / torch.as_tensor(total, device=items.device)

    def weights(samples: int) -> Tensor:
        # Labels may be of other samples than attention's, of whole videos say, and queries of their frames.
        return share if samples == len(share) else (share.sum() / samples).expand(samples)

    return weights


def _shifts_labels(model: nn.Module) -> bool:
    """Whether the model predicts the next token, and so has nothing to say to the first label: the Trainer's rule."""
    if "transformers" not in sys.modules:
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    inner: Any = model
    if hasattr(inner, "get_base_model"):  # PEFT's wrapper
        inner = inner.get_base_model()
    loss = LOSS_MAPPING.get(str(getattr(inner, "loss_type", None)))
    return loss is ForCausalLMLoss and not getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
