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


class Adversary:
    """Steps the networks of a matcher; `optimizer` is None until there are any."""

    def __init__(self, networks: nn.Module, *, rate: float, betas: tuple[float, float]) -> None:
        self.networks = networks
        self.rate, self.betas = rate, betas
        self.optimizer: torch.optim.Optimizer | None = None
        self.due = False  # a loss has been handed out since the last step

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
        if any(parameter.device != device for parameter in self.networks.parameters()):
            self.networks.to(device)
            state = {} if self.optimizer is None else self.optimizer.state
            for values in state.values():
                values.update({k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)})

    @torch.no_grad()
    def step(self) -> None:
        """Take the step that is due, if one is. Every process must call this together."""
        if self.optimizer is None or not self.due:
            return
        self.due = False
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        arrived = any(p.grad is not None for p in parameters)
        if not arrived and not several():
            return
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        skip = parameters[0].new_zeros(())
        if several():
            skip += _averaged(parameters, arrived=arrived)
        gradients = [parameter.grad for parameter in parameters]
        # As torch's own scaler looks at gradients, all in one call; what it multiplies them by is one.
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, skip, torch.ones_like(skip))
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]
        self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None
            increment_version(parameter)  # fused Adam does not tell autograd that it wrote

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
