"""Every Python block of the README runs as it stands, and what it promises is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block {i}" for i in range(len(BLOCKS))])
def test_code_of_the_readme_runs(block, capsys):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_diff_of_the_readme_trains_with_the_trainer(bert, batch, tmp_path):
    """The opening diff, with a tiny model and data."""
    from transformers import Trainer, TrainingArguments

    import alignattn

    plain = {name: value.clone() for name, value in bert.state_dict().items()}
    data = [{name: tensor[i] for name, tensor in batch.items()} for i in range(3)] * 2
    args = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=4,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    alignment = alignattn.align(bert, method="ct")
    Trainer(model=bert, args=args, train_dataset=data).train()
    assert alignment.steps == 4
    assert alignment.adversary.optimizer.state
    alignment.detach()
    assert bert.state_dict().keys() == plain.keys()
    weight = "bert.encoder.layer.0.attention.self.query.weight"
    assert not bert.state_dict()[weight].equal(plain[weight])
