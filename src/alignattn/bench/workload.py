"""The models, batches and training steps that are timed: made from a configuration, with random weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from alignattn.models.pretrained import library


@dataclass(frozen=True)
class Shape:
    """A BERT encoder, and the batch it is given."""

    name: str
    layers: int
    width: int
    heads: int
    batch: int
    tokens: int
    precision: str  # of autocast: "fp32", "bf16" or "fp16"
    vocabulary: int = 30522

    def __str__(self) -> str:
        return f"{self.name}, {self.batch} × {self.tokens}, {self.precision}"


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_model(shape: Shape, device: torch.device) -> nn.Module:
    """A classifier of two classes, in training mode. Models of one shape begin alike."""
    transformers = library()
    config = transformers.BertConfig(
        vocab_size=shape.vocabulary,
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        max_position_embeddings=max(512, shape.tokens),
        num_labels=2,
        problem_type="single_label_classification",  # else it is found out in the first call, and compiled for anew
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = transformers.BertForSequenceClassification(config)
    return model.to(device).train()


def make_batch(shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """Random words; every fourth sample is padded by a quarter."""
    generator = torch.Generator("cpu").manual_seed(1)
    ids = torch.randint(1, shape.vocabulary, (shape.batch, shape.tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[::4, -(shape.tokens // 4) :] = 0
    batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.arange(shape.batch) % 2}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """For "fp32" it is off."""
    return torch.autocast(device.type, dtype=DTYPES.get(precision), enabled=precision in DTYPES)


def training_step(
    model: nn.Module,
    batch: dict[str, Tensor],
    precision: str,
    term: Callable[[], Tensor] | None = None,
    *,
    called: Callable[..., Any] | None = None,
) -> Callable[[], None]:
    """Forward, backward and fused AdamW.

    `term` is added to the loss where alignment does not do so by itself; `called` is called for the model.
    """
    run = model if called is None else called
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    device = next(model.parameters()).device

    def step() -> None:
        with autocast(device, precision):
            loss = run(**batch).loss
            if term is not None:
                loss = loss + term()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
