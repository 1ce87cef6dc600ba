"""A tiny encoder, made here, and small files of every task."""

import pytest
from finetune_rows import rows_of, write_jsonl

from alignattn import cli

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "the", "a", "very", "not", "is", "dull"]


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """A BERT of two layers with its tokenizer, as a folder that transformers loads; "##" pieces for longer words."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join([*WORDS, "##ing", "##s"]))
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"))
    assert tokenizer.tokenize("good films") == ["good", "film", "##s"]  # a vocabulary not found would make all one
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(vocab_size=len(WORDS) + 2, initializer_range=0.2, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def files(tmp_path):
    """Writes the training and evaluation files of a task."""

    def write(task):
        rows = rows_of(task)
        return write_jsonl(tmp_path / "train.jsonl", rows), write_jsonl(tmp_path / "eval.jsonl", rows[:6])

    return write


@pytest.fixture
def finetune(encoder):
    """Types the command: two steps on the CPU, but for what is said otherwise."""

    def type_(train, evaluation, out, *more):
        places = ["--model", str(encoder), "--train", str(train), "--eval", str(evaluation), "--out", str(out)]
        few = ["--steps", "2", "--batch-size", "4", "--learning-rate", "0.002", "--device", "cpu"]
        return cli.main(["finetune", *places, *few, *more])

    return type_
