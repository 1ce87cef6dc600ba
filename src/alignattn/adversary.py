"""The adversary: discriminator, critic and navigator, with an optimizer of their own.

They are no part of the user's model: its clipping, weight decay, schedule, LoRA freezing and sharding would starve
them. Their gradients come from the same backward as the model's, are averaged over processes, and the step is taken
right after the model's own. A gradient that is not finite skips the step.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from alignattn.processes import several
from alignattn.updates import others_listen


class Adversary:
    """Steps the networks of a matcher; `optimizer` is None until there are any."""

    def __init__(self, networks: nn.Module, *, rate: float, betas: tuple[float, float]) -> None:
        self.networks = networks
        self.rate, self.betas = rate, betas
        self.optimizer: torch.optim.Optimizer | None = None
        self.due = False  # a loss has been handed out since the last step
        self._one: Tensor | None = None  # on the device

    def take_on(self) -> None:
        """Networks may have been made: optimize those too."""
        known = set() if self.optimizer is None else {p for g in self.optimizer.param_groups for p in g["params"]}
        new = [parameter for parameter in self.networks.parameters() if parameter not in known]
        if not new:
            return
        if self.optimizer is None:
            # Fused Adam looks at `found_inf` on the device: a step is skipped without the host waiting to know.
            self.optimizer = torch.optim.Adam(new, lr=self.rate, betas=self.betas, fused=True)
            self.optimizer.is_adversary = True  # type: ignore[attr-defined]  # updates.py tells it from the user's
        else:
            self.optimizer.param_groups[0]["params"] += new  # one group: so a saved state fits however it came about

    def follow(self, device: torch.device) -> None:
        """Move to where the queries and keys are."""
        if self.optimizer is not None and any(parameter.device != device for parameter in self._parameters()):
            self.networks.to(device)
            for values in self.optimizer.state.values():
                values.update({k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)})

    def _parameters(self) -> list[Tensor]:
        """All of the networks, as the optimizer has them: to ask the networks takes longer."""
        return [] if self.optimizer is None else [p for group in self.optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self) -> None:
        """Take the step that is due, if one is. Every process must call this together."""
        if self.optimizer is None or not self.due:
            return
        self.due = False
        parameters = self._parameters()
        gradients = [parameter.grad for parameter in parameters]
        arrived = any(gradient is not None for gradient in gradients)
        if not arrived and not several():
            return
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                parameter.grad = torch.zeros_like(parameter)
        skip = parameters[0].new_zeros(())
        if several():
            skip += _averaged(parameters, arrived=arrived)
        all_of_them = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self._one is None or self._one.device != skip.device:
            self._one = torch.ones_like(skip)
        # As torch's own scaler looks at gradients, all in one call; what it multiplies them by is one.
        torch._amp_foreach_non_finite_check_and_unscale_(all_of_them, skip, self._one)
        self._adam(self.optimizer, parameters, all_of_them, skip)
        for parameter in parameters:
            parameter.grad = None
            increment_version(parameter)  # fused Adam does not tell autograd that it wrote

    def _adam(
        self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], gradients: list[Tensor], skip: Tensor
    ) -> None:
        """The optimizer's step. What torch does around its kernel each time takes twice as long as that."""
        states = [optimizer.state.get(parameter) for parameter in parameters]
        known = [state for state in states if state]
        if len(known) < len(parameters) or not _is_as_we_made_it(optimizer):
            optimizer.found_inf = skip  # type: ignore[attr-defined]
            optimizer.step()
            return
        (group,), steps = optimizer.param_groups, [state["step"] for state in known]
        torch._foreach_add_(steps, 1)
        torch._fused_adam_(
            parameters, gradients, [state["exp_avg"] for state in known], [state["exp_avg_sq"] for state in known], [],
            steps, lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
            weight_decay=group["weight_decay"], amsgrad=False, maximize=group["maximize"], found_inf=skip,
        )  # fmt: skip
        torch._foreach_sub_(steps, [skip] * len(steps))  # a step that is skipped does not count

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and, where a step is due that processes must take together, its gradients."""
        if not several():
            self.step()
        if self.optimizer is None:
            return {}
        gradients = [None if p.grad is None else p.grad.clone() for p in self.networks.parameters()] if self.due else []
        return {"moments": self.optimizer.state_dict()["state"], "gradients": gradients}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Nothing is changed if it does not fit."""
        if not state:
            return
        fresh = Adversary(self.networks, rate=self.rate, betas=self.betas)
        fresh.take_on()
        assert fresh.optimizer is not None
        _check_moments(fresh.optimizer, state["moments"])
        fresh.optimizer.load_state_dict(fresh.optimizer.state_dict() | {"state": state["moments"]})
        self.optimizer, self.due = fresh.optimizer, bool(state["gradients"])
        for parameter, gradient in zip(self.networks.parameters(), state["gradients"], strict=False):
            parameter.grad = None if gradient is None else gradient.to(parameter)


def _is_as_we_made_it(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is that of one kernel, and nobody waits to be told of it."""
    if type(optimizer) is not torch.optim.Adam or len(optimizer.param_groups) > 1:
        return False
    if "step" in vars(optimizer):  # a scheduler, say, counts the calls
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or others_listen():
        return False
    group = optimizer.param_groups[0]
    usual = group["fused"] and not (group["amsgrad"] or group.get("decoupled_weight_decay"))
    kinds = {(parameter.device, parameter.dtype) for parameter in group["params"]}
    return bool(usual) and isinstance(group["lr"], float) and len(kinds) == 1


def _averaged(parameters: list[Tensor], *, arrived: bool) -> Tensor:
    """Replace gradients by their means over processes; one where none of them had any, else zero."""
    gradients = [parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([*gradients, gradients[0].new_full((1,), float(arrived))])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    start = 0
    for parameter in parameters:
        end = start + parameter.numel()
        parameter.grad = flat[start:end].view_as(parameter)
        start = end
    return (flat[-1] == 0).to(flat)


def _check_moments(optimizer: torch.optim.Optimizer, moments: dict[int, dict[str, Tensor]]) -> None:
    """Adam would take moments of any shape, and fail at its next step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in moments.items():
        for name in ("exp_avg", "exp_avg_sq"):
            if index >= len(parameters) or values[name].shape != parameters[index].shape:
                raise ValueError(f"the optimizer's {name} of parameter {index} has another shape")
