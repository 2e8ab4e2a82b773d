"""Files of a checkpoint for the experts of one expert-parallel rank.

DeepSpeed writes the weights of the first data-parallel rank only, which has some of the experts.
Here they are left out of its file, and the first rank that has them writes them to one of their
own: every expert is in exactly one file.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.sharding import expert_group


def expert_file(ep_rank: int, tp_rank: int) -> str:
    """Name of the file with the experts of a rank."""
    return f"experts_ep_rank_{ep_rank:02d}_mp_rank_{tp_rank:02d}_model_states.pt"


class ExpertFiles:
    """The experts of this rank's model in checkpoints.

    Args:
        model: The model.
        mesh: Mesh of this process.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if expert_group(parameter) is not None
        }
        self.name = expert_file(mesh.ep.rank, mesh.tp.rank)
        self._is_writer = mesh.expert_dp.rank == 0

    def left_out(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state of DeepSpeed's without the weights of experts."""
        module = state.get("module")
        if not self._parameters or module is None:
            return state
        kept = {name: value for name, value in module.items() if name not in self._parameters}
        return {**state, "module": kept}

    def own_file(self) -> dict[str, Any]:
        """The weights by canonical name that this rank writes; empty if another rank does."""
        if not self._is_writer:
            return {}
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of experts that only some data-parallel ranks have."""
        return tuple(self._parameters)
