"""A tiny classifier, sentences for it, and the Trainer's arguments: what the tests of hosts train."""

from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

# Plain SGD of rate one and one step: an update is minus a gradient, and can be compared.
ONE_GRADIENT = {
    "max_steps": 1,
    "learning_rate": 1.0,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0,
    "train_sampling_strategy": "sequential",
}


def make_classifier(*, dropout: float = 0.0, width: int = 16) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": width}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(BertConfig(vocab_size=50, **sizes, **rates))


def sentences(count: int, *, tokens: bool = False) -> list[dict[str, torch.Tensor]]:
    """Of different lengths, padded; with a label for the sentence, or for every token but the padding."""
    generator = torch.Generator().manual_seed(1)
    data = []
    for i in range(count):
        ids = torch.randint(5, 50, (8,), generator=generator)
        mask = (torch.arange(8) < 4 + i % 5).long()
        label = torch.where(mask > 0, ids, -100) if tokens else torch.tensor(i % 2)
        data.append({"input_ids": ids, "attention_mask": mask, "labels": label})
    return data


def arguments(folder: Any, **changes: Any) -> TrainingArguments:
    values = {
        "output_dir": str(folder),
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 3,
    }
    return TrainingArguments(**(values | changes))
