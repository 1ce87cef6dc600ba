"""A tiny checkpoint with its tokenizer, and sentences that it knows."""

import torch

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "the", "a", "very", "not", "is", "dull"]
SENTENCES = [
    "good film",
    "bad film",
    "the film is very good",
    "a dull film",
    "not bad",
    "very dull",
    "the film is dull",
]


def save_model(folder, words=WORDS, layers=2, head=None):
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertTokenizerFast

    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(words), initializer_range=0.2, **sizes)
    plain = BertForMaskedLM(config)
    if head is not None:  # the same model with a head for a task, and its keys moved
        tuned = BertForSequenceClassification(config)
        tuned.bert.load_state_dict(plain.bert.state_dict(), strict=False)
        with torch.no_grad():
            for layer in tuned.bert.encoder.layer:
                layer.attention.self.key.bias += head
        plain = tuned
    plain.save_pretrained(folder)
    return folder
