"""Sums over parameters, gradients and updates that are partitioned over the ranks.

Owns which rank counts which parameter, that copies which are not counted must be finite as well,
and what is counted in the optimizer's step itself: the zeros of its gradients, and the norms and
sums of each parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ds.config.devices import is_host
from megatron_ds.engine.deepspeed import nvme_states
from megatron_ds.engine.parts import EngineParts
from megatron_ds.engine.states.flats import Flat, own_flats, replicas_of
from megatron_ds.launch.device import sum_dtype
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.sharding import expert_group, shard_spec, states_of

CHUNK = 2**22
"""Elements whose squares are summed at once; the sums are added in `sum_dtype`."""
ROW = 256
"""Elements whose squares a CPU adds in fp32."""
SMALLEST = 1e-20
"""Sum of squares below which squares of elements may be too small for fp32."""
ZEROS = "num_zeros_in_grad"
NORMS = ("layer_grad_norm", "layer_params_norm", "layer_update_ratio")
"""Names of metrics; a layer's end with `/` and its number, or the name of another layer."""
GRADIENT, AFTER, UPDATE, BEFORE = range(1, 5)
"""Rows of `_Sums.total`: of squares of gradients, of parameters after the step, of updates, and of
parameters before the step. Row 0 counts zeros."""
SUMS = 4
"""Offset from the row of a value's squares to the row of its sum. Updates have no row of sums."""
ROWS = BEFORE + SUMS + 1
ParameterSums = dict[str, dict[str, list[float]]]
"""Norm and sum of elements, by kind of tensor and by the parameter's canonical name."""


def norm_of(gradient: Tensor) -> Tensor:
    """The L2 norm of a gradient, finite if all its elements are and it is below 1e19."""
    dtype = torch.float64 if is_host(gradient.device.type) else torch.float32
    return torch.linalg.vector_norm(gradient.detach(), dtype=dtype)  # type: ignore[no-any-return]


def sum_of_squares(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of all elements, a scalar in `sum_dtype`.

    An accelerator computes the norms of hundreds of tensors of a type in one launch; it adds in a
    tree, for which fp32 suffices. A CPU adds one after the other, in fp32 within short rows only.
    """
    if is_host(device.type):
        return _sum_on_host([tensor.detach().to(device).reshape(-1) for tensor in tensors])
    sums = sum_dtype(device.type)
    squares = torch.zeros((), dtype=sums, device=device)
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        values = tensor.to(device)
        is_long = tensor.numel() > CHUNK
        chunks = values.flatten().split(CHUNK) if is_long else [values]
        by_type.setdefault(tensor.dtype, []).extend(chunks)
    for chunks_of_type in by_type.values():
        norms = torch._foreach_norm(chunks_of_type, 2, dtype=torch.float32)
        squares += torch.stack(norms).to(sums).square().sum()
    return squares


def _sum_on_host(vectors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of vectors on a CPU.

    torch's kernel for fp32 reads each element once. A norm in fp64 converts all of them first; only
    squares outside of fp32 need it.
    """
    for is_exact in (False, True):
        norms = [norms for vector in vectors for norms in _row_norms(vector, is_exact=is_exact)]
        squares = torch.cat([torch.zeros(1), *norms]).double().square().sum()
        if SMALLEST < float(squares) < torch.inf:
            break
    return squares


def _row_norms(vector: Tensor, *, is_exact: bool) -> Iterator[Tensor]:
    """The norms of rows of `ROW` elements, and of the rest; in fp64, but for fp32 unless exact."""
    length = vector.numel() - vector.numel() % ROW
    is_fast = vector.dtype == torch.float32 and not is_exact
    dtype = torch.float32 if is_fast else torch.float64
    for rows in (vector[:length].view(-1, ROW), vector[length:].unsqueeze(0)):
        if rows.numel():
            yield torch.linalg.vector_norm(rows, dim=1, dtype=dtype)


def clip(gradients: list[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients as `torch.nn.utils.clip_grad_norm_` does, without waiting for the norm."""
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0).float())


def is_counted(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Whether this rank counts a parameter for its model-parallel group.

    A sharded parameter counts on every tensor-parallel rank, a replicated one on the first, an
    expert on the expert-parallel rank that has it, and a tied one on a pipeline's first stage.
    """
    is_tied = getattr(parameter, "ds_pipe_replicated", False)
    return not is_tied and (mesh.tp.rank == 0 or shard_spec(parameter) is not None)


class ModelNorms:
    """Norms over all parameters of the model, each counted once.

    The copies that are not counted are added with the factor 0, which an infinity and NaN turn into
    NaN: a norm is finite only if every value of every copy is.

    Args:
        parts: Parts of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._mesh = parts.mesh
        self._device = parts.device
        self._stage = parts.stage
        self.parameters = tuple(parts.engine.module.named_parameters())
        """This rank's, by name. A walk over the modules takes longer than a small tensor's norm."""
        self._module = parts.engine.module
        self._marked = tuple(
            (parameter, expert_group(parameter) is not None, is_counted(parameter, self._mesh))
            for _, parameter in self.parameters
        )
        """Parameters, each with whether it belongs to experts and whether this rank counts it."""

    def norm(self, values_of: Callable[[nn.Parameter], Tensor | None]) -> Tensor:
        """The L2 norm of a value of each parameter, a scalar in `sum_dtype`. Collective."""
        return self._sum_of_squares(values_of).sqrt()

    def of_parameters(self) -> float:
        """The L2 norm of the parameters. Not finite if a state of a layer is not. Collective."""
        squares = self._sum_of_squares(self._own_partition)
        if self._stage == 3:
            dist.all_reduce(squares, group=self._mesh.replicas.handle)
        states = self._squares([], [*states_of(self._module).values()])
        return float((squares + states).sqrt())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that a checkpoint saves of this rank's model, by name: parameters (at stage 3
        this rank's partitions) and states of layers."""
        for name, parameter in self.parameters:
            yield name, self._own_partition(parameter)
        yield from states_of(self._module).items()

    def first_nonfinite(self) -> str | None:
        """The first weight of this rank that is not finite."""
        return next((name for name, w in self.weights() if not norm_of(w).isfinite()), None)

    def _own_partition(self, parameter: nn.Parameter) -> Tensor:
        """This data-parallel rank's ZeRO-3 partition, without padding; else the parameter."""
        if self._stage != 3:
            return parameter.data
        size = parameter.ds_numel  # type: ignore[attr-defined]
        partition = nvme_states.partition_of(parameter)
        start = self._mesh.replicas.rank * partition.numel()
        piece: Tensor = partition.flatten()[: max(0, size - start)]
        return piece

    def _sum_of_squares(self, values_of: Callable[[nn.Parameter], Tensor | None]) -> Tensor:
        tensors: dict[tuple[bool, bool], list[Tensor]] = defaultdict(list)
        for parameter, is_expert, counts in self._marked:
            values = values_of(parameter)
            if values is not None:
                tensors[is_expert, counts].append(values)
        squares = self._squares(tensors[False, True], tensors[False, False])
        experts = tensors[True, True], tensors[True, False]
        if any(experts) or self._mesh.ep.size > 1:
            expert_squares = self._squares(*experts)
            if self._mesh.ep.size > 1:
                dist.all_reduce(expert_squares, group=self._mesh.ep.handle)
            squares += expert_squares
        if self._mesh.model.size > 1:
            dist.all_reduce(squares, group=self._mesh.model.handle)
        return squares

    def _squares(self, counted: list[Tensor], copies: list[Tensor]) -> Tensor:
        squares = sum_of_squares(counted, self._device)
        if copies:
            squares += 0 * sum_of_squares(copies, self._device)
        return squares


class StepNorms:
    """Counts zeros of the gradient and sums squares by layer, while the optimizer steps.

    The optimizer's own tensors are read: each rank has the averaged and clipped gradients of the
    elements that it updates, in fp32 and whatever the layout. Every element of the model is read on
    one rank, so that one sum over all ranks is exact.

    Args:
        parts: Parts of the engine. Options of logging say whether zeros are counted, and in which
            steps norms are computed.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._engine = parts.engine
        self._stage = parts.stage
        self._mesh = parts.mesh
        self._device = parts.device
        self._zeros = parts.config.logging.log_num_zeros_in_grad
        self._interval = parts.config.logging.log_layer_norms_interval
        self._flats: dict[int, Flat] = {}
        names = [name for name, _ in self._engine.module.named_parameters()]
        stages = gather_objects(names, self._mesh.pp)
        every = dict.fromkeys(name for stage in stages for name in stage)
        self._places = {name: index for index, name in enumerate(every)}
        self._layers = list(dict.fromkeys(map(layer_of, every)))

    @contextmanager
    def counting(self, iteration: int, *, is_recorded: bool = False) -> Iterator[_Sums | None]:
        """Reads the optimizer's tensors in the step of this iteration; None if it is not due."""
        logs_layers = self._interval is not None and iteration % self._interval == 0
        has_norms = logs_layers or is_recorded
        if not (has_norms or self._zeros):
            yield None
            return
        if not self._flats:  # within its step, DeepSpeed changes the optimizer's groups
            flats = own_flats(self._engine, self._stage, self._mesh)
            self._flats = {id(flat.master): flat for flat in flats}
        sums = _Sums(self, has_norms)
        optimizers = (
            self._engine.basic_optimizer,
            getattr(self._engine.optimizer, "backup_optimizer", None),  # of a partial offload
        )
        with ExitStack() as hooks:
            for optimizer in filter(None, optimizers):
                first = optimizer.register_step_pre_hook(sums.before)
                # A hook of cautious decay changes the weights.
                first.hooks_dict_ref().move_to_end(first.id, last=False)
                hooks.callback(first.remove)
                hooks.callback(optimizer.register_step_post_hook(sums.after).remove)
            sums.logs_layers = logs_layers
            yield sums

    def complete(self, sums: _Sums, norm: Any) -> None:
        """All-reduces the sums of an applied step, and undoes the clipping of the gradients.
        Collective.

        Args:
            sums: Sums of this rank.
            norm: Gradient norm before clipping.
        """
        if self._mesh.world_size > 1:
            dist.all_reduce(sums.total)
        clip = self._engine.gradient_clipping()
        if sums.has_norms and clip > 0:
            known = torch.as_tensor(norm, dtype=sums.total.dtype, device=self._device)
            factor = (clip / (known + 1e-6)).clamp(max=1.0)
            sums.total[GRADIENT] /= factor.square()
            sums.total[GRADIENT + SUMS] /= factor

    def metrics(self, sums: _Sums) -> Mapping[str, Tensor]:
        """Computes the metrics from completed sums, as unsynchronized tensors."""
        metrics = {ZEROS: sums.total[0].sum()} if self._zeros else {}
        if not sums.logs_layers:
            return metrics
        layers = [self._layers.index(layer_of(name)) for name in self._places]
        total = sums.total.new_zeros(UPDATE, len(self._layers))
        total.index_add_(1, torch.tensor(layers, device=self._device), sums.total[1 : UPDATE + 1])
        gradients, params, updates = total.sqrt()
        ratios = torch.where(params > 0, updates / params, 0.0)
        for name, values in zip(NORMS, (gradients, params, ratios), strict=True):
            layer_values = zip(self._layers, values, strict=True)
            metrics |= {f"{name}/{layer}": value for layer, value in layer_values}
        return metrics

    def by_parameter(self, sums: _Sums) -> ParameterSums:
        """Norm and sum of elements of each parameter, from completed sums. Waits for the device."""
        rows = {"weights": BEFORE, "gradients": GRADIENT, "updated": AFTER}
        values = {
            name: torch.stack([sums.total[row].sqrt(), sums.total[row + SUMS]], dim=1).tolist()
            for name, row in rows.items()
        }
        return {name: dict(zip(self._places, pairs, strict=True)) for name, pairs in values.items()}

    def of_updates(self, sums: _Sums) -> dict[str, float]:
        """Norm of each parameter's update, from completed sums. Waits for the device."""
        return dict(zip(self._places, sums.total[UPDATE].sqrt().tolist(), strict=True))

    def parts(self, master: Tensor) -> Iterator[tuple[int, slice]]:
        """Parameter and place of what this rank counts of a tensor that the optimizer steps."""
        for part in self._flats[id(master)].parts:
            is_copy = self._stage == 0 and replicas_of(part.parameter, self._mesh).rank > 0
            if not is_copy and is_counted(part.parameter, self._mesh):
                span = slice(part.position, part.position + len(part.elements))
                yield self._places[part.place.name], span

    def empty(self) -> Tensor:
        dtype = sum_dtype(self._device.type)
        return torch.zeros(ROWS, len(self._places), dtype=dtype, device=self._device)


class _Sums:
    """Sums of elements and squares of one step on this rank, filled by hooks of the optimizers."""

    def __init__(self, owner: StepNorms, has_norms: bool) -> None:
        self._owner = owner
        self.has_norms = has_norms
        self.logs_layers = False
        self.total = owner.empty()
        """[rows, parameters] in `sum_dtype`."""
        self._before: dict[Tensor, Tensor | None] = {}
        self._depth = 0

    @torch.no_grad()
    def before(self, optimizer: Any, *arguments: Any) -> None:
        # An optimizer whose step calls its base class's step calls hooks for both.
        self._depth += 1
        if self._depth > 1:
            return
        for master in (tensor for group in optimizer.param_groups for tensor in group["params"]):
            if master.grad is None:
                continue
            self._before[master] = master.detach().clone() if self.has_norms else None
            gradient = master.grad.view(-1)
            places = list(self._owner.parts(master))
            for index, where in places:
                zeros = gradient[where].numel() - gradient[where].count_nonzero()
                self.total[0, index] += zeros.to(self.total.device)
            if self.has_norms:
                self._add(GRADIENT, places, gradient)
                self._add(BEFORE, places, master.detach().view(-1))

    @torch.no_grad()
    def after(self, *arguments: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        for master, before in self._before.items():
            if before is None:
                continue
            places = list(self._owner.parts(master))
            self._add(AFTER, places, master.view(-1))
            self._add(UPDATE, places, (master - before).view(-1))
        self._before.clear()

    def _add(self, row: int, places: Sequence[tuple[int, slice]], values: Tensor) -> None:
        for index, span in places:
            self.total[row, index] += sum_of_squares([values[span]], self.total.device)
            if row != UPDATE:
                total = values[span].sum(dtype=sum_dtype(values.device.type))
                self.total[row + SUMS, index] += total.to(self.total.dtype).to(self.total.device)


def layer_of(name: str) -> str:
    """The layer of a parameter: its number, or the name of another layer such as "embedding"."""
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] if first == "layers" else first
