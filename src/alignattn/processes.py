"""Training in several processes."""

import torch.distributed as dist


def several() -> bool:
    """Whether this process has others to agree with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
