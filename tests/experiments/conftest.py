"""A tiny encoder and tiny data, made here: nothing is downloaded."""

import json

import pytest

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "the", "a", "very", "not", "is", "dull"]


@pytest.fixture
def encoder_folder(tmp_path):
    """A BERT of two layers with its tokenizer, as a folder that transformers loads."""
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    folder = tmp_path / "tiny-bert"
    folder.mkdir()
    BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def glue_folder(tmp_path):
    """SST-2, STS-B and two kinds of NLI, each a few rows, in the official formats."""
    root = tmp_path / "data"
    sentences = ["good film", "bad film", "the film is very good", "a dull film", "not bad", "very dull"]
    labels = [1, 0, 1, 0, 1, 0]
    for split, repeat in (("train", 8), ("dev", 2)):
        for name, lines in {
            "SST-2": ["sentence\tlabel", *[f"{s} \t{y}" for s, y in zip(sentences, labels, strict=True)] * repeat],
            "STS-B": [
                "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
                *[
                    f"0\tg\tf\ty\t0\tn\tn\t{s}\tgood film\t{y * 2.5 + i / 10:.3f}"
                    for i, (s, y) in enumerate(zip(sentences, labels, strict=True))
                ]
                * repeat,
            ],
        }.items():
            (root / "glue" / name).mkdir(parents=True, exist_ok=True)
            (root / "glue" / name / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    names = ["entailment", "neutral", "contradiction"]
    pairs = [
        {"gold_label": names[i % 3], "sentence1": s, "sentence2": "good film"} for i, s in enumerate(sentences)
    ] + [{"gold_label": "-", "sentence1": "a film", "sentence2": "a film"}]
    (root / "snli").mkdir()
    for split in ("train", "test"):
        (root / "snli" / f"snli_1.0_{split}.jsonl").write_text("\n".join(map(json.dumps, pairs)) + "\n")
    (root / "glue" / "MNLI").mkdir()
    rows = [f"{i}\t{p['sentence1']}\t{p['sentence2']}\t{p['gold_label']}" for i, p in enumerate(pairs[:-1])]
    (root / "glue" / "MNLI" / "dev_matched.tsv").write_text(
        "\n".join(["index\tsentence1\tsentence2\tgold_label", *rows]) + "\n"
    )
    return root
