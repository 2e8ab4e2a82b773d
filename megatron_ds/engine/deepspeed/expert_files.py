"""Files of a checkpoint for the experts of one expert-parallel rank.

DeepSpeed writes the weights of the first data-parallel rank only, which has some of the experts,
and without ZeRO its optimizer's states. Here experts are left out of its file, and the first rank
that has them writes them to files of their own: every expert is in exactly one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.sharding import expert_group


def expert_file(ep_rank: int, model_rank: int) -> str:
    """Name of the file with the experts of a rank."""
    return f"experts_ep_rank_{ep_rank:02d}_mp_rank_{model_rank:02d}_model_states.pt"


class ExpertFiles:
    """The experts of this rank's model in checkpoints.

    Args:
        model: The model.
        mesh: Mesh of this process.
        optimizer: Optimizer with the states of full parameters; None with ZeRO, which writes its
            partitions itself, or if the states are not saved.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, optimizer: Optimizer | None) -> None:
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if expert_group(parameter) is not None
        }
        self._optimizer = optimizer
        self._weights_file = expert_file(mesh.ep.rank, mesh.model.rank)
        self._states_file = self._weights_file.replace("model_states", "optim_states")
        self._is_writer = mesh.expert_dp.rank == 0

    def left_out(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state of DeepSpeed's without what is in the files of experts."""
        module = state.get("module")
        optimizer = state.get("optimizer")
        if not self._parameters or module is None:
            return state
        replicated = {name: value for name, value in module.items() if name not in self._parameters}
        state = {**state, "module": replicated}
        if optimizer is not None:
            experts = _states_of_experts(optimizer)
            others = {n: entry for n, entry in optimizer["state"].items() if n not in experts}
            state["optimizer"] = {**optimizer, "state": others}
        return state

    def own_files(self) -> dict[str, dict[Any, Any]]:
        """The content of the files that this rank writes, by name."""
        if not self._is_writer or not self._parameters:
            return {}
        weights = {name: parameter.detach() for name, parameter in self._parameters.items()}
        files: dict[str, dict[Any, Any]] = {self._weights_file: weights}
        if self._optimizer is not None:
            files[self._states_file] = _states_of_experts(self._optimizer.state_dict())
        return files

    def add_to(self, state: dict[str, Any], read: Callable[[str], dict[Any, Any]]) -> None:
        """Add this rank's experts to a state of DeepSpeed's that was read.

        Args:
            state: State that `left_out` returned.
            read: Reads a file of the same folder.
        """
        if not self._parameters or "module" not in state:
            return
        state["module"].update(read(self._weights_file))
        if state.get("optimizer") is not None:
            state["optimizer"]["state"].update(read(self._states_file))

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of experts that only some data-parallel ranks have."""
        return tuple(self._parameters)


def _states_of_experts(optimizer: dict[str, Any]) -> dict[int, Any]:
    """The states of experts in the state dict of an optimizer, by their number in it."""
    groups = (group for group in optimizer["param_groups"] if group.get("moe"))
    numbers = [index for group in groups for index in group["params"]]
    return {index: optimizer["state"][index] for index in numbers if index in optimizer["state"]}
