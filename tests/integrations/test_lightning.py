"""Alignment in a LightningModule."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import alignattn
from alignattn.errors import DataError

lightning = pytest.importorskip("lightning.pytorch", reason="pip install lightning")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Classifier(lightning.LightningModule):
    def __init__(self, method="gan"):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dropout=0.0)  # Lightning keeps no random state
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)
        self.alignment = alignattn.align(self.encoder, method, weight=0.5)

    def training_step(self, batch, _):
        x, y = batch
        return F.cross_entropy(self.head(self.encoder(x).mean(1)), y) + self.alignment.loss()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def loader():
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(5, 16, generator=generator), i % 2) for i in range(24)]
    return torch.utils.data.DataLoader(data, batch_size=4)


def fit(module, folder, *, epochs, callbacks, resume=None, **options):
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        log_every_n_steps=2,
        callbacks=callbacks,
        **options,
    )
    torch.manual_seed(5)
    trainer.fit(module, loader(), ckpt_path=resume, weights_only=True if resume else None)
    return trainer


def state_of(module):
    networks = {f"networks.{k}": v for k, v in module.alignment.matcher.state_dict().items()}
    return copy.deepcopy({**module.state_dict(), **networks})


def test_a_resumed_run_is_the_unbroken_one_and_the_logs_have_the_alignment(tmp_path):
    from alignattn.integrations.lightning import AlignmentCallback

    module = Classifier()
    callbacks = [AlignmentCallback(module.alignment)]
    assert not any(name.startswith("alignment") for name in module.state_dict())
    trainer = fit(module, tmp_path, epochs=2, callbacks=callbacks)
    for name in ("alignment_loss", "alignment_weight", "alignment/layers.0.self_attn"):
        assert torch.isfinite(trainer.logged_metrics[name])
    module.alignment.adversary.step()
    whole = state_of(module)
    module.alignment.detach()

    module = Classifier()
    trainer = fit(module, tmp_path, epochs=1, callbacks=[AlignmentCallback(module.alignment)])
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    module.alignment.detach()

    module = Classifier()
    callbacks = [AlignmentCallback(module.alignment)]
    fit(module, tmp_path, epochs=2, callbacks=callbacks, resume=tmp_path / "half.ckpt")
    module.alignment.adversary.step()
    resumed = state_of(module)
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, msg=name)
    assert module.alignment.steps == 12


def test_resuming_from_a_checkpoint_without_the_alignment_raises(tmp_path):
    from alignattn.integrations.lightning import AlignmentCallback

    module = Classifier()
    trainer = fit(module, tmp_path, epochs=1, callbacks=[])
    trainer.save_checkpoint(tmp_path / "without.ckpt")
    module.alignment.detach()
    module = Classifier()
    with pytest.raises(DataError, match="holds no alignment"):
        fit(
            module,
            tmp_path,
            epochs=2,
            callbacks=[AlignmentCallback(module.alignment)],
            resume=tmp_path / "without.ckpt",
        )


def test_accumulated_batches_are_one_update(tmp_path):
    module = Classifier()
    fit(module, tmp_path, epochs=1, callbacks=[], accumulate_grad_batches=3)
    module.alignment.adversary.step()
    assert {int(s["step"]) for s in module.alignment.adversary.optimizer.state.values()} == {2}
