"""Two tiny checkpoints of one model, one of them fine-tuned for a task, and a file of text."""

import pytest
from made_models import SENTENCES, save_model


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="session")
def tuned(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("runs") / "mine" / "model", head=2.0)


@pytest.fixture
def reviews(tmp_path):
    path = tmp_path / "reviews.csv"
    path.write_text("id,review\n" + "\n".join(f"{i},{SENTENCES[i % 7]}" for i in range(21)) + "\n")
    return path
