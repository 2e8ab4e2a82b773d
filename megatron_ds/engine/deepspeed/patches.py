"""All places where this package replaces parts of DeepSpeed or resets its internal state.

In four sections: what corrects its numbers, what prevents its failures, what gives it objects of
this package, and what saves time and noise. The settings that loading a checkpoint replaces are
restored elsewhere: the loss scaler's in `loss_scaler.py`, the optimizer's in `param_groups.py`, and
clipping in `zero.py`; `nvme_states.py` makes ordinary tensors of states on a disk, and
`flat_gradients.py` sums and clips the gradients of the bf16 optimizer of stage 1,
`gradient_sums.py` spares the other optimizers of ZeRO copies and messages of gradients,
`zero_costs.py` work on parameters; `shared_masters.py` of the states makes master weights in bf16
the parameters.

Private attributes of DeepSpeed are also read, without being replaced, in `deepspeed/partitions.py`,
`deepspeed/checkpoint_io.py`, `deepspeed/nvme_states.py`, `states/resharding.py`,
`optimizers/distributed_matrices.py`, `readback.py`, `pipeline.py` and `module.py`.

Written for DeepSpeed 0.19.x. Read this file first when upgrading DeepSpeed: every function states
which behaviour it changes and why, so that it can be removed once DeepSpeed behaves differently.
"""

from __future__ import annotations

import glob
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer, compiler
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import module as pipe_module
from deepspeed.runtime.swap_tensor import partitioned_param_swapper
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.utils import groups
from torch import nn

from megatron_ds.config import PrecisionConfig
from megatron_ds.config.problems import user_error
from megatron_ds.engine.norms import is_counted, sum_of_squares
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.sharding import expert_group, expert_group_name

PARAMETERS_OF_A_MODULE = 2
"""Most parameters that a module of the model has: a weight and a bias."""


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it, an attribute has another value, and afterwards it is again what it was."""
    is_own = name in vars(owner)
    original = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


# Numbers: what DeepSpeed computes wrongly, or depends on more than its arguments.


def reset_cpu_adam_beta_powers(optimizer: object) -> None:
    """Make the next step of DeepSpeedCPUAdam depend on its arguments alone.

    Its C++ code keeps the powers of the betas and multiplies them from step to step, but calls
    pow() where the step number does not follow the last one. After a resume the result would
    differ from an uninterrupted run's in the last bits. A call with step 0 before each step
    forces pow() every time.
    """
    kernel = getattr(optimizer, "ds_opt_adam", None)
    if kernel is None:
        return
    dummies = [torch.zeros(1) for _ in range(4)]
    options = optimizer.defaults  # type: ignore[attr-defined]
    beta1, beta2 = options["betas"]
    opt_id = optimizer.opt_id  # type: ignore[attr-defined]
    kernel.adam_update(opt_id, 0, 0.0, beta1, beta2, options["eps"], 0.0, True, *dummies)


def drop_skipped_gradients(optimizer: Any) -> None:
    """Make an offloaded ZeRO optimizer forget the gradients of a step that it skips.

    With half precision and gradients that are accumulated in fp32, the pinned DeepSpeed keeps them
    and adds the gradients of the next step: after one that is not finite, every step would be
    skipped.

    Args:
        optimizer: DeepSpeedZeroOptimizer; others are left as they are.
    """
    if not getattr(optimizer, "cpu_offload", False):
        return
    reset = optimizer.reset_cpu_buffers  # called at the end of every step, skipped or not

    def reset_all() -> None:
        reset()
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None

    optimizer.reset_cpu_buffers = reset_all


def check_every_copy(optimizer: Any, mesh: Mesh) -> None:
    """Make a ZeRO optimizer skip a step if any rank's gradient is not finite.

    Its norm leaves out the copies of a parameter that another rank counts, and the norm decides: a
    step whose gradient is not finite in such a copy only would be applied, after which the copies
    differ. Here the norms of these copies are added with the factor 0, which an infinity and NaN
    turn into NaN. They enter the sum of what this rank counts: no message is added, and no wait but
    for an offloaded group of which it counts nothing. DeepSpeed is given this rank's sum instead of
    the gradients, of which it would convert and measure one after the other.

    Args:
        optimizer: DeepSpeedZeroOptimizer or DeepSpeedZeroOptimizer_Stage3; others are left as they
            are.
        mesh: Mesh of this process.
    """
    if not hasattr(optimizer, "get_grad_norm_direct"):
        return
    direct = "get_grad_norm_direct"
    offloaded = "complete_grad_norm_calculation_for_cpu_offload"
    for method, with_copies in ((direct, _norm_with_copies), (offloaded, _offloaded_with_copies)):
        original = getattr(optimizer, method)
        setattr(optimizer, method, partial(with_copies, optimizer, mesh, original))


@contextmanager
def _counting(optimizer: Any, parameter: nn.Parameter) -> Iterator[None]:
    """Within it, DeepSpeed counts a parameter on this rank."""
    with (
        replaced(optimizer, "model_parallel_rank", 0),
        replaced(parameter, "ds_pipe_replicated", False),
    ):
        yield


def _norm_with_copies(
    optimizer: Any,
    mesh: Mesh,
    norm_of: Callable[[list[torch.Tensor], list[nn.Parameter]], torch.Tensor],
    gradients: Sequence[torch.Tensor],
    parameters: Sequence[nn.Parameter],
) -> torch.Tensor:
    """Replaces `get_grad_norm_direct`: returns the norm of a group's gradients over all ranks."""
    values = [value for value in gradients if not getattr(value, "_zero_padding", False)]
    pairs = [*zip(values, parameters, strict=False)]  # as DeepSpeed pairs them
    if not pairs:
        return norm_of([*gradients], [*parameters])
    first, weight = pairs[0]
    counted = [value for value, weight in pairs if is_counted(weight, mesh)]
    squares = sum_of_squares(counted, first.device)
    if len(counted) < len(pairs):
        copies = [value for value, weight in pairs if not is_counted(weight, mesh)]
        squares += 0 * sum_of_squares(copies, first.device)
    with _counting(optimizer, weight):
        return norm_of([squares.sqrt()], [weight])


def _offloaded_with_copies(
    optimizer: Any,
    mesh: Mesh,
    norm_of: Callable[[list[nn.Parameter]], torch.Tensor],
    parameters: Sequence[nn.Parameter],
) -> torch.Tensor:
    """Replaces `complete_grad_norm_calculation_for_cpu_offload`, for which the optimizer has stored
    the norm of each gradient."""
    norms = optimizer.norm_for_param_grads
    key_of = optimizer.get_param_id
    known = [weight for weight in parameters if key_of(weight) in norms]
    counted = [weight for weight in known if is_counted(weight, mesh)]
    copies = [weight for weight in known if not is_counted(weight, mesh)]
    if not copies:
        return norm_of([*parameters])
    zero = 0 * torch.stack([norms[key_of(weight)] for weight in copies]).sum()
    if counted:
        norms[key_of(counted[0])] = norms[key_of(counted[0])] + zero
        return norm_of(counted)
    norms[key_of(copies[0])] = zero
    with _counting(optimizer, copies[0]):
        return norm_of(copies[:1])


def set_hpz_group(dp: Group, size: int) -> dist.ProcessGroup | None:
    """Set the ranks among which hpZ gathers second copies of the parameters. Collective.

    By itself it takes consecutive ranks of all, which mixes the shards of tensor-parallel ranks.

    Args:
        dp: Data-parallel group.
        size: Consecutive ranks of it with one copy; 1 for no second copy.

    Returns:
        The group of this process; None without second copies.
    """
    group = None
    if size > 1:
        start = dp.rank // size * size
        ranks = list(dp.ranks[start : start + size])
        group = dist.new_group(ranks, use_local_synchronization=True)
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = group
    return group


# Failures: where DeepSpeed stops or waits indefinitely.


def reduce_norm_once(optimizer: Any, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Make a ZeRO optimizer all-reduce its gradient norm over the model-parallel ranks once.

    DeepSpeed calls an all-reduce for each parameter group. Pipeline stages may have different
    numbers of groups, and would wait for each other indefinitely.

    Args:
        optimizer: DeepSpeedZeroOptimizer; others are left as they are.
        group: Model-parallel group.
        device: Device of the group's collectives. The norm is on the host if states are offloaded.
    """
    if not hasattr(optimizer, "scaled_global_norm"):
        return
    norm_of_groups = optimizer.scaled_global_norm
    reduce = optimizer._model_parallel_all_reduce

    def scaled_global_norm(norm_type: int = 2) -> torch.Tensor:
        optimizer._model_parallel_all_reduce = _do_nothing
        try:
            norm: torch.Tensor = norm_of_groups(norm_type)  # inf if it is not finite
        finally:
            optimizer._model_parallel_all_reduce = reduce
        square = norm.to(device).square()
        dist.all_reduce(square, group=group)
        return square.sqrt().to(norm.device)

    optimizer.scaled_global_norm = scaled_global_norm


def limit_parameter_prefetch() -> None:
    """Make DeepSpeed's swapper of parameters prefetch each once, and not into the last buffers.

    It prefetches in the order of use, where the last layer's parameters appear twice: for the
    forward and for the backward pass. If both uses are prefetched together, the pinned DeepSpeed
    fails ("already assigned swap buffer id"). It also prefetches into all buffers, and fails ("Not
    enough buffers") when a parameter is needed in another order, as for an evaluation.
    """
    swapper = partitioned_param_swapper.AsyncPartitionedParameterSwapper
    original = swapper.swap_in
    if original.__module__ != swapper.__module__:
        return  # replaced before

    def swap_in(
        self: Any, params: list[Any], async_op: bool = True, swap_in_buffers: Any = None
    ) -> None:
        wanted = list({id(param): param for param in params}.values())
        if async_op and swap_in_buffers is None:
            wanted = wanted[: max(0, self.available_swap_in_buffers() - PARAMETERS_OF_A_MODULE)]
        if wanted:
            original(self, wanted, async_op, swap_in_buffers)

    swapper.swap_in = swap_in


@contextmanager
def literal_folder(folder: Path) -> Iterator[None]:
    """Within it, a folder of checkpoints may have a name such as `lr [1e-3]`.

    DeepSpeed lists the files of a checkpoint by a pattern that begins with the folder. It would
    take the brackets for a part of the pattern, find no files, and fail.
    """
    find = glob.glob
    prefix = str(folder)

    def find_in_folder(pattern: str, **options: Any) -> list[str]:
        if pattern.startswith(prefix):
            pattern = glob.escape(prefix) + pattern.removeprefix(prefix)
        return find(pattern, **options)

    with replaced(glob, "glob", find_in_folder):
        yield


# Interface: where DeepSpeed has no parameter for what it is given here.


def require_precision(config: PrecisionConfig) -> None:
    """Check that the accelerator trains in the configured number format.

    With --allow-fp16-on-cpu, DeepSpeed's CPU accelerator is made to report fp16 as supported: torch
    computes fp16 on every CPU, slowly.

    Raises:
        UserError: If it does not.
    """
    accelerator = get_accelerator()
    if not config.fp16 or accelerator.is_fp16_supported():
        return
    if not config.allow_fp16_on_cpu:
        raise user_error("fp16-not-supported", device=accelerator.device_name())
    cls = type(accelerator)
    supported = accelerator.supported_dtypes()

    def is_fp16_supported(accelerator: object) -> bool:
        return True

    def supported_dtypes(accelerator: object) -> list[torch.dtype]:
        return [*supported, torch.half]

    cls.is_fp16_supported = is_fp16_supported
    cls.supported_dtypes = supported_dtypes


def replace_checkpoint_engine(
    engine: Any, checkpoint_engine: object, on_script: Callable[[], None]
) -> None:
    """Make a DeepSpeed engine read and write its checkpoint files through our own object.

    Args:
        engine: Engine of `deepspeed.initialize`.
        checkpoint_engine: Replacement of `engine.checkpoint_engine`.
        on_script: Called when DeepSpeed would copy its zero_to_fp32.py into the folder of the
            checkpoints, in the middle of a collective save, where an exception on one rank would
            leave its peer ranks waiting, and all would wait for the disk.
    """

    def copy_recovery_script(folder: str) -> None:
        on_script()

    engine.checkpoint_engine = checkpoint_engine
    engine._copy_recovery_script = copy_recovery_script


def replace_pipeline_grid(grid: object) -> AbstractContextManager[None]:
    """Let a PipelineModule that is built inside use this grid.

    Its constructor would build a PipelineParallelGrid, which creates the process groups of the mesh
    a second time, including the groups of all other ranks.
    """
    return replaced(pipe_module, "PipelineParallelGrid", lambda **_: grid)


def replace_pipeline_instructions(
    engine: Any, instructions: dict[type, Callable[..., None]], before: Callable[[], None]
) -> None:
    """Make a pipeline engine execute instructions of its schedule by other functions.

    Args:
        engine: PipelineEngine of `deepspeed.initialize`.
        instructions: Called with the arguments of the instruction. DeepSpeed binds its own
            functions to the engine.
        before: Called before each of them.
    """

    def bound(function: Callable[..., None]) -> Callable[..., None]:
        def run(_: Any, **arguments: Any) -> None:
            before()
            function(**arguments)

        return run

    functions = {instruction: bound(function) for instruction, function in instructions.items()}
    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, **functions}


@contextmanager
def expert_groups(mesh: Mesh) -> Iterator[None]:
    """Make the engines that are built in the context reduce and partition experts by their groups.

    DeepSpeed treats parameters as experts only in models with layers of its own class, and creates
    their process groups in an order of the ranks of its own: its tables are replaced by the mesh's.
    Without expert parallelism nothing is changed.
    """
    if mesh.ep.size == 1:
        yield
        return
    name = expert_group_name(mesh.ep.size)
    groups._EXPERT_PARALLEL_GROUP = {name: mesh.ep.handle}
    groups._EXPERT_PARALLEL_GROUP_RANKS = {name: list(mesh.ep.ranks)}
    groups._EXPERT_DATA_PARALLEL_GROUP = {name: mesh.expert_dp.handle}
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS = {name: list(mesh.expert_dp.ranks)}
    original = DeepSpeedEngine._configure_distributed_model

    def configure(engine: Any, model: Any) -> None:
        original(engine, model)
        # A pipeline stage may have no experts.
        engine.has_moe_layers = any(map(expert_group, model.parameters()))

    with replaced(DeepSpeedEngine, "_configure_distributed_model", configure):
        yield


def experts_saved_by_caller(engine: Any) -> AbstractContextManager[None]:
    """Make an engine save and load checkpoints as for a model without experts.

    DeepSpeed's own files of experts are only for layers of its class.
    """
    return replaced(engine, "has_moe_layers", False)


@contextmanager
def skip_step_if(optimizer: Any, exceeds: Callable[[Any], bool]) -> Iterator[None]:
    """Make a ZeRO optimizer skip its next step, as one with non-finite gradients, on a condition.

    Its step computes the gradient norm and skips the step if the norm is invalid, before it changes
    anything. The norm is known nowhere else: at stage 2 and above a rank has its partition only.
    A dynamic loss scale stays as it is, because the gradients did not overflow.

    Args:
        optimizer: Optimizer of a DeepSpeed engine at stage 1, 2 or 3.
        exceeds: Called once, on all ranks, with the unscaled norm if it is finite.
    """
    original = bf16_optimizer.is_invalid_grad_norm  # the same function in all modules
    update_scale = getattr(optimizer, "_update_scale", None)
    decisions: list[bool] = []

    def is_invalid(norm: Any) -> bool:
        if original(norm):
            return True
        if not decisions:
            decisions.append(exceeds(norm / getattr(optimizer, "loss_scale", 1.0)))
        return decisions[0]

    def update_scale_unless_exceeded(overflow: bool) -> None:
        assert update_scale is not None
        update_scale(overflow and not any(decisions))

    with ExitStack() as stack:
        for module in (stage_1_and_2, stage3, bf16_optimizer):
            stack.enter_context(replaced(module, "is_invalid_grad_norm", is_invalid))
        if update_scale is not None:
            stack.callback(delattr, optimizer, "_update_scale")
            optimizer._update_scale = update_scale_unless_exceeded
        yield


# Cost and noise: work of DeepSpeed that has no effect here.


def _do_nothing(*args: object, **kwargs: object) -> None:
    pass


def silence_memory_reports() -> None:
    """Keep DeepSpeed's bf16 optimizer of stage 1 from printing memory at each group of parameters.

    The banner has these figures; the optimizer also collects garbage for each of them.
    """
    bf16_optimizer.see_memory_usage = _do_nothing


def import_muon_without_compile() -> None:
    """Import DeepSpeed's Muon optimizer without compiling its kernels.

    Every ZeRO optimizer checks whether it wraps Muon, and importing that module applies
    torch.compile: one second of start-up and 40 MB for an optimizer that is not used here.
    DeepSpeed's own `dummy_decorator`, meant for a torch without a compiler, leaves the functions
    as they are.
    """
    with replaced(compiler, "compile", lambda: compiler.dummy_decorator):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def spare_work_of_stage_0(
    engine: Any, clip: Callable[[], None], parameters: Sequence[torch.Tensor], replicas: int
) -> None:
    """Spare an engine of stage 0 work that has no effect, or that the training step has done.

    It computes the norm of all gradients for clipping, parameter by parameter, walks over all
    modules to drop them, and copies all of a single replica through a buffer.

    Args:
        engine: Engine of `deepspeed.initialize` at stage 0.
        clip: Scales the gradients; called by the engine before the optimizer's step.
        parameters: All parameters of its module.
        replicas: Data-parallel ranks.
    """

    def drop_gradients() -> None:
        for parameter in parameters:
            parameter.grad = None

    engine.clip_fp32_gradients = clip
    engine.zero_grad = drop_gradients
    if replicas == 1:
        engine.enable_backward_allreduce = False
        engine.pipeline_enable_backward_allreduce = False  # of a pipeline's engine
