"""What each data set is: its files, columns and labels.

Nothing here reads a file. A data set with files of the same kind needs an entry in `DATASETS` and no code.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Where the files of a data set lie, and how a line becomes sentences and a label."""

    files: Mapping[str, tuple[str, ...]]  # of each split, by preference; .jsonl holds objects, other names tables
    folders: tuple[str, ...]  # under the folder given, or directly there
    sentences: tuple[str, ...]  # columns, or keys of the objects
    label: str  # column or key
    classes: tuple[str, ...] = ()  # none: the label is a score
    labels: Mapping[str, int] = field(default_factory=dict)  # as written: index into classes
    scores: tuple[float, float] = (0.0, 0.0)  # least and greatest
    left_out: Mapping[str, str] = field(default_factory=dict)  # labels whose rows the format leaves out: why
    odd_lines: Mapping[str, re.Pattern[str]] = field(default_factory=dict)  # lines that the format leaves out, by why
    columns: tuple[str, ...] = ()  # of a table without header line
    separator: str = "\t"  # a space: the last column may hold spaces
    foreign: tuple[str, ...] = ()  # columns of another data set with files of the same name
    votes: tuple[str, ...] = ()  # columns with single annotators' labels; a row may have fewer or more than its header

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.files)


def _glue(folder: str) -> tuple[str, ...]:
    return (folder, f"glue/{folder}", f"glue_data/{folder}")


def _by_name(classes: tuple[str, ...]) -> dict[str, int]:
    return {name: index for index, name in enumerate(classes)}


BINARY = {"0": 0, "1": 1}
TRAIN_DEV = {"train": ("train.tsv",), "dev": ("dev.tsv",)}  # GLUE's test.tsv carries no labels
SENTIMENT = ("negative", "positive")
PARAPHRASE = ("not_paraphrase", "paraphrase")
INFERENCE = ("entailment", "neutral", "contradiction")  # of both, so that a model of one can be tested on the other
RTE = ("entailment", "not_entailment")
NO_MAJORITY = {"-": "no majority label"}
VOTES = ("label1", "label2", "label3", "label4", "label5")

# Six votes a pair: 4 or more for a paraphrase, 2 or fewer for none. Both spellings occur.
TWITTER_VOTES = {f"({k},{space}6)": int(k >= 4) for k in (0, 1, 2, 4, 5, 6) for space in ("", " ")}
TWITTER_TIES = {"(3,6)": "3 of 6 votes", "(3, 6)": "3 of 6 votes"}
# The published test file has 250 empty lines, and ten pairs with a column too many. Readers in use take rows of four
# columns alone, which gives the 9324 pairs that are reported.
TWITTER_ODD_LINES = {
    "empty line": re.compile(""),
    "empty column before the link": re.compile(r"[^\t]*\t[^\t]*\t\([0-6], ?6\)\t\t[^\t]*"),
}


def _reviews(name: str) -> DatasetSpec:
    """A set of 1000 published with TextFooler (Jin et al. 2020): label, space, text."""
    return DatasetSpec(
        files={"test": (name,)},
        folders=("attack_sets",),
        columns=("label", "text"),
        separator=" ",
        sentences=("text",),
        label="label",
        classes=SENTIMENT,
        labels=BINARY,
    )


DATASETS = {
    "mrpc": DatasetSpec(
        # Not msr_paraphrase_train.txt: GLUE's dev.tsv is a part of it.
        files={**TRAIN_DEV, "test": ("test_labelled.tsv", "msr_paraphrase_test.txt")},
        folders=_glue("MRPC"),
        sentences=("#1 String", "#2 String"),
        label="Quality",
        classes=PARAPHRASE,
        labels=BINARY,
    ),
    "sst2": DatasetSpec(
        files=TRAIN_DEV,
        folders=_glue("SST-2"),
        sentences=("sentence",),
        label="label",
        classes=SENTIMENT,
        labels=BINARY,
    ),
    "cola": DatasetSpec(
        files=TRAIN_DEV,
        folders=_glue("CoLA"),
        columns=("source", "label", "mark", "sentence"),
        sentences=("sentence",),
        label="label",
        classes=("unacceptable", "acceptable"),
        labels=BINARY,
    ),
    "rte": DatasetSpec(
        files=TRAIN_DEV,
        folders=_glue("RTE"),
        sentences=("sentence1", "sentence2"),
        label="label",
        classes=RTE,
        labels=_by_name(RTE),
    ),
    "stsb": DatasetSpec(
        files=TRAIN_DEV,
        folders=_glue("STS-B"),
        sentences=("sentence1", "sentence2"),
        label="score",
        scores=(0.0, 5.0),
    ),
    "mnli": DatasetSpec(
        files={
            "train": ("train.tsv", "multinli_1.0_train.jsonl", "multinli_1.0_train.txt"),
            "dev": ("dev_matched.tsv", "multinli_1.0_dev_matched.jsonl", "multinli_1.0_dev_matched.txt"),
            "dev_mismatched": (
                "dev_mismatched.tsv",
                "multinli_1.0_dev_mismatched.jsonl",
                "multinli_1.0_dev_mismatched.txt",
            ),
        },
        folders=(*_glue("MNLI"), "multinli_1.0"),
        foreign=("captionID",),
        sentences=("sentence1", "sentence2"),
        label="gold_label",
        classes=INFERENCE,
        labels=_by_name(INFERENCE),
        left_out=NO_MAJORITY,
        votes=VOTES,
    ),
    "snli": DatasetSpec(
        files={
            "train": ("snli_1.0_train.jsonl", "snli_1.0_train.txt", "train.tsv", "snli_1.0_train_100k.jsonl"),
            "dev": ("snli_1.0_dev.jsonl", "snli_1.0_dev.txt", "dev.tsv"),
            "test": ("snli_1.0_test.jsonl", "snli_1.0_test.txt", "test.tsv"),  # GLUE's SNLI is the one with labels
        },
        folders=("snli", "snli_1.0", *_glue("SNLI")),
        foreign=("promptID", "genre"),
        sentences=("sentence1", "sentence2"),
        label="gold_label",
        classes=INFERENCE,
        labels=_by_name(INFERENCE),
        left_out=NO_MAJORITY,
        votes=VOTES,
    ),
    "twitter_ppdb": DatasetSpec(
        files={"test": ("Twitter_URL_Corpus_test.txt",)},
        folders=("twitter_ppdb",),
        columns=("sentence1", "sentence2", "votes", "link"),
        sentences=("sentence1", "sentence2"),
        label="votes",
        classes=PARAPHRASE,
        labels=TWITTER_VOTES,
        left_out=TWITTER_TIES,
        odd_lines=TWITTER_ODD_LINES,
    ),
    "imdb": _reviews("imdb"),
    "yelp": _reviews("yelp"),
}
