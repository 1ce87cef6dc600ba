"""Lightning: the alignment in the logs, the adversary in the checkpoints.

The term itself stands in `training_step`, as in any loop: `return loss + alignment.loss()`, or in the loss that a
transformers model returns. Lightning divides accumulated losses itself.
"""

from typing import TYPE_CHECKING, Any

from alignattn.errors import AlignmentError, DataError

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise AlignmentError("This needs Lightning: pip install 'alignattn[lightning]'") from error

if TYPE_CHECKING:
    from alignattn.alignment import Alignment


class AlignmentCallback(Callback):
    """`Trainer(callbacks=[AlignmentCallback(alignment)])`; make the alignment before, or in the module's __init__."""

    def __init__(self, alignment: "Alignment") -> None:
        self.alignment = alignment
        self._restored = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.alignment.meter.read()  # what an earlier training left
        if trainer.global_step > 0 and trainer.ckpt_path is not None and not self._restored:
            raise DataError(
                f"Training goes on from {trainer.ckpt_path}, which holds no alignment: it was saved without this "
                "callback. The adversary would begin anew."
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.global_step % every == 0:  # reading waits for the device
            pl_module.log_dict(self.alignment.meter.read())

    def state_dict(self) -> dict[str, Any]:
        self.alignment.advance()  # in every process; it would come anyway, before the next step
        return self.alignment.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.alignment.load_state_dict(state_dict)
        self._restored = True
