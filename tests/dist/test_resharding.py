"""Checkpoints of every layout continue on every other one: weights, moments, steps, data position.

Runs of some layouts take two steps, save, and take a third step. Engines of other layouts load each
checkpoint, after all their states were overwritten, and take that third step. Right after the load
master weights and moments must be equal bit for bit, element by element, as DeepSpeed's own
functions return them; then the loss, the norm and the weights after the step are compared.
Some checkpoints are also saved in the background, converted to DeepSpeed's universal format, or
saved without states of the optimizer.

In `make test`, each layout of `BASIC_LAYOUTS` loads the checkpoint of the one before it in its
family, the first one that of the last one if there are more than two: among them are all kinds of
sizes and all ZeRO stages.

The proofs complete them: of the dense layouts, all sizes are resharded to all, all stages to all
and all sizes to all stages, and every layout saves and loads; in the other families, every layout
loads the checkpoints of the two before it, cyclically.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)

from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.checkpoint.files.full_weights import lazy_full_weights
from megatron_ds.checkpoint.files.local_files import find_damaged_files
from megatron_ds.checkpoint.files.native_reader import SavedStates
from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import (
    ParallelLayout,
    check_names,
    list_checkpoints,
    read_manifest,
    read_run,
)
from megatron_ds.checkpoint.run_checkpoints import RunCheckpoints
from megatron_ds.checkpoint.universal.folders import SUFFIX
from megatron_ds.checkpoint.universal.writer import convert_checkpoint, open_verified
from megatron_ds.config import CheckpointConfig, Config, support_matrix
from megatron_ds.config.options.optimizer_specs import ADAM, SPECS
from megatron_ds.conversion.native import source_of
from megatron_ds.engine.deepspeed.loss_scaler import STATE
from megatron_ds.engine.readback import master_weights
from megatron_ds.engine.states.state_reader import VOCABULARY_TABLES
from megatron_ds.inference.load_checkpoint import load_model
from tests.dist import proofs
from tests.dist.compare import differing_names, worst_difference
from tests.dist.engine_harness import (
    Meshes,
    batches_of,
    by_one_message,
    full_tensors,
    full_weights,
    of_all_stages,
)
from tests.dist.nonfinite_harness import RATES, Training
from tests.dist.offload_harness import SMALLEST_SWAPPED, WITHOUT_LIBAIO, swap_small_tensors
from tests.dist.parity_cases import SHAPE, Case, config_of
from tests.dist.rank_jobs import JobResults, Jobs, run_by_world, selected
from tests.dist.reference import Tensors
from tests.tables import UniqueNames, tables

TABLES = tables(__file__, tuple)

WORLDS = (1, 2, 4)
STEPS = 2
"""Steps before the checkpoint."""
OVERWRITTEN = 7.0
RELATIVE = 1e-6
IN_HALF_PRECISION = 2e-2


@dataclass(frozen=True)
class Layout:
    """What a run uses."""

    stage: int
    world: int = 2
    tp: int = 1
    pp: int = 1
    ulysses: int = 1
    cp: int = 1
    ep: int = 1
    partition: str = "type:transformer"
    accumulation: int = 2
    schedule: str = "1f1b"
    model: str = "gqa"
    optimizer: str = "adamw"
    zero: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of zero_optimization."""
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Changed fields of the configuration by group."""

    def config(self, folder: Path) -> Config:
        parallel = {"pp_partition_method": self.partition, "pipeline_schedule": self.schedule}
        changes: dict[str, Any] = {"parallel": parallel, "schedule": RATES, **self.changes}
        case = Case(
            self.world,
            self.stage,
            self.tp,
            self.accumulation,
            self.model,
            self.optimizer,
            pp=self.pp,
            sp=self.ulysses,
            cp=self.cp,
            ep=self.ep,
        )
        if "deepspeed" in self.changes:
            disk = {"nvme_path": str(folder / "disk")} if "nvme" in str(self.changes) else {}
            changes["deepspeed"] = {**self.changes["deepspeed"], **disk}
        config = config_of(case, **changes)
        assert config.deepspeed_file is not None
        config.deepspeed_file.values["zero_optimization"] |= self.zero
        config.deepspeed_file.values["aio"] = {"block_size": SMALLEST_SWAPPED}
        return config

    @property
    def relative(self) -> float:
        """Tolerance of a step's results."""
        return IN_HALF_PRECISION if "precision" in self.changes else RELATIVE


DENSE = TABLES["dense"]
BF16 = TABLES["bf16"]
SIZES: dict[str, dict[str, int]] = TABLES["sizes"]
"""Tensor-, pipeline- and data-parallel size."""


def stages_of(sizes: str) -> list[int]:
    """The ZeRO stages that sizes allow."""
    names = {"tp": "tp", "pp": "pp", "ulysses": "sp", "cp": "cp"}
    many = {axis: support_matrix.MANY for name, axis in names.items() if name in SIZES[sizes]}
    layouts = (many | {"zero": str(stage)} for stage in range(4))
    return [n for n, layout in enumerate(layouts) if proofs.obstacle(layout) is None]


DENSE_LAYOUTS = UniqueNames[tuple[str, Layout]]()
for sizes, options in SIZES.items():
    for stage in stages_of(sizes):
        # Stages with other layers at each ZeRO stage.
        partition = "1,2" if stage == 0 and "pp" in options else "type:transformer"
        layout = Layout(stage, **options, partition=partition, changes={"model": DENSE})
        DENSE_LAYOUTS[f"dense {sizes} zero{stage}"] = sizes, layout
NVME = {"deepspeed": {"nvme_optimizer": True}}
FAMILIES = {
    family: {name: Layout(**row) for name, row in layouts.items()}
    for family, layouts in TABLES["families"].items()
}
BASIC_LAYOUTS: dict[str, tuple[str, ...]] = dict(TABLES["basic_layouts"])
"""Those of `make test`."""
WITHOUT_FAMILY = {
    spec.name: spec.checkpoint_name
    for spec in SPECS
    if spec.name not in {ADAM.name, *FAMILIES}  # `DENSE_LAYOUTS` are Adam's
}
"""Further optimizers; a variant, which has more states, instead of its optimizer."""
for family, name in WITHOUT_FAMILY.items():
    FAMILIES[family] = {
        layout: Layout(**row, optimizer=name) for layout, row in TABLES["of_optimizer"].items()
    }
    BASIC_LAYOUTS[family] = ("zero3 tp2", "zero1 pp2")
if WITHOUT_LIBAIO is not None:
    del FAMILIES["memory"]["zero3 nvme"]
LAYOUTS = UniqueNames((name, layout) for name, (_, layout) in DENSE_LAYOUTS.items())
for family, layouts in FAMILIES.items():
    LAYOUTS |= ((f"{family} {name}", layout) for name, layout in layouts.items())
ASYNC = " in the background"
"""Suffix of the folder with a save in the background."""
WEIGHTS = " weights"
"""Suffix of the folder with weights alone."""

Pair = tuple[str, str]
"""Names of the layout that saves and of the layout that loads."""
Demand = tuple[tuple[str, Any], ...]


def demands(pair: Pair) -> set[Demand]:
    """What a pair of dense layouts covers: values of the source with values of the target."""
    (source_sizes, source), (sizes, target) = (DENSE_LAYOUTS[name] for name in pair)
    one = ("source sizes", source_sizes), ("source stage", source.stage)
    other = ("sizes", sizes), ("stage", target.stage)
    return {*itertools.product(one, other), (("source", pair[0]),), (("target", pair[1]),)}


def completing(basic: Iterable[Pair]) -> Iterator[Pair]:
    """The dense pairs that cover what those of `make test` leave.

    Each is the first of those with the most uncovered demands.
    """
    left = {pair: demands(pair) for pair in itertools.permutations(DENSE_LAYOUTS, 2)}
    missing = set[Demand]().union(*left.values()).difference(*map(left.pop, basic))
    while missing:
        best = max(left, key=lambda pair: len(left[pair] & missing))
        missing -= left.pop(best)
        yield best


def cyclic(families: Mapping[str, Collection[str]], offset: int) -> Iterator[Pair]:
    """Each layout of a family with a later one."""
    for family, layouts in families.items():
        names = [each for name in layouts if (each := f"{family} {name}") in LAYOUTS]
        for index, source in enumerate(names):
            yield source, names[(index + offset) % len(names)]


BASIC = tuple(
    pair
    for family, layouts in BASIC_LAYOUTS.items()
    for pair in list(cyclic({family: layouts}, 1))[: 1 if len(layouts) == 2 else None]
)
"""Pairs of `make test`: of a family of two, the second loads the checkpoint of the first."""
NEXT = (*cyclic(FAMILIES, 1), *cyclic(FAMILIES, 2))
FURTHER = (
    *completing(pair for pair in BASIC if pair[0] in DENSE_LAYOUTS),
    *(pair for pair in NEXT if pair not in BASIC),
)
"""Further pairs of the proofs."""
LAST = {target: source for source, target in (*FURTHER, *BASIC)}
"""Of each layout the checkpoint that it also loads in other forms."""
UNIVERSAL = TABLES["universal"]
WITHOUT_OPTIMIZER = TABLES["without_optimizer"]
IN_BACKGROUND = TABLES["in_background"]
"""Layouts that do so in `make test`; the others are proofs."""


class Continued(Training):
    """A training that saves and loads complete checkpoints."""

    def __init__(
        self, name: str, folder: Path, meshes: Meshes, layout: Layout | None = None
    ) -> None:
        swap_small_tensors()
        layout = layout or LAYOUTS[name]
        config = layout.config(folder)
        super().__init__(config, meshes.of(config.parallel), 100)
        self.ds = self.engine._engine
        self.layout = layout

    def manager(self, folder: Path, log: list[str], **changes: bool) -> CheckpointManager:
        options = CheckpointConfig(save=str(folder), load=str(folder), **changes)
        config = dataclasses.replace(self.config, checkpoint=options)
        folders = RunFolders.local(options)
        run = RunCheckpoints(config, self.mesh, log.append, CollectiveIO(), folders)
        return CheckpointManager(run)

    def states(self) -> dict[str, Tensors]:
        """Full master weights and moments by kind, as DeepSpeed reads them, and the weights."""
        if self.layout.stage in (1, 2):
            # DeepSpeed itself links the states of the first group that is stepped only.
            optimizer = self.ds.optimizer
            masters = master_weights(self.ds)
            groups = getattr(optimizer, "bf16_groups", None) or optimizer.bit16_groups
            for group, master in zip(groups, masters, strict=True):
                lazy_init_hp_params_optimizer_state(group, master, self.ds.basic_optimizer.state)
        found: dict[str, Tensors] = {"weights": full_weights(self.engine, self.mesh)}
        if has_states := "moe" in self.layout.changes:
            found["states"] = self.layer_states()
        if "round_robin_gradients" in self.layout.zero:
            return {"weights": without_padding(found["weights"])}  # DeepSpeed reads other elements
        own: dict[str, Tensors] = {}
        named = dict(self.ds.module.named_parameters())
        with by_one_message():
            for name, parameter in named.items():
                for kind in ("master", *self.kinds_of(name, parameter)):
                    own.setdefault(kind, {})[name] = self.read(parameter, kind)
        assert has_states == bool(found.get("states"))
        for kind in sorted(own):
            full = full_tensors(own[kind], named, self.mesh.tp, self.mesh.ep)
            found[kind] = of_all_stages(full, self.mesh)
        return {kind: without_padding(tensors) for kind, tensors in found.items()}

    def layer_states(self) -> Tensors:
        """States of the layers of all stages."""
        states = {name: state.clone() for name, state in self.ds.module.named_buffers()}
        assert all(state.dtype == torch.float32 for state in states.values())
        return of_all_stages(states, self.mesh)

    def kinds_of(self, name: str, parameter: torch.nn.Parameter) -> tuple[str, ...]:
        spec = self.config.optimizer.spec
        is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) > 1
        is_matrix = is_matrix and name.startswith("layers.") and not name.endswith(".bias")
        states = spec.matrices.states if is_matrix and spec.matrices else spec.states
        return tuple(state.name for state in states)

    def read(self, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
        """A state of the shape of this rank's parameter."""
        if self.layout.stage == 0:
            state = self.ds.basic_optimizer.state
            return parameter.detach() if kind == "master" else state[parameter][kind]
        if kind == "master":
            return safe_get_full_fp32_param(parameter)
        return safe_get_full_optimizer_state(parameter, kind)

    def steps(self) -> set[int]:
        """Numbers of steps that the optimizer counts."""
        return {
            int(state["step"])
            for state in self.ds.basic_optimizer.state.values()
            if "step" in state
        }

    def scale(self) -> Any:
        scaler = getattr(self.ds.optimizer, "loss_scaler", None)
        return None if scaler is None else [getattr(scaler, name, None) for name in STATE]

    @torch.no_grad()
    def overwrite(self) -> None:
        """Overwrites all states, so that nothing remains of an earlier load."""
        moments = [
            value
            for state in self.ds.basic_optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        parameters = [
            getattr(parameter, "ds_tensor", parameter) for parameter in self.ds.module.parameters()
        ]
        for tensor in (*moments, *parameters, *self.ds.module.buffers(), *master_weights(self.ds)):
            tensor.fill_(OVERWRITTEN)

    def third_step(self) -> dict[str, Any]:
        self.batches = batches_of(self.config, self.mesh, self.samples, self.state.consumed_samples)
        result = self.step()
        assert not result.skipped
        loss = torch.tensor(float(result.loss), dtype=torch.float64)
        dist.all_reduce(loss, group=self.mesh.dp.handle)
        assert result.grad_norm is not None
        return {
            "loss": loss.item() / self.mesh.dp.size,
            "norm": float(result.grad_norm),
            "weights": without_padding(full_weights(self.engine, self.mesh)),
        }


def without_padding(tensors: Tensors) -> Tensors:
    """The tensors without the padding of the vocabulary, which must be zero."""
    vocab = SHAPE["vocab_size"]
    for name in VOCABULARY_TABLES:
        if name in tensors:
            assert tensors[name][vocab:].count_nonzero() == 0, name
    return {
        name: tensor[:vocab] if name in VOCABULARY_TABLES else tensor
        for name, tensor in tensors.items()
    }


def save_layout(name: str, forms: Collection[str], folder: Path, meshes: Meshes) -> list[str]:
    """Takes two steps, saves, and records the states and the third step.

    An asynchronous save of the same states is written after the third step.

    Returns:
        What readers of the weights find otherwise than in the run.
    """
    training = Continued(name, folder, meshes)
    for _ in range(STEPS):
        training.step()
    for number, state in enumerate(training.ds.module.buffers()):
        state.copy_(torch.linspace(0.1, 1.0 + number, len(state)))  # not exact in bf16
    training.manager(folder / name, []).saving.save(training.engine, training.state)
    wrong = [*wrong_weights(training, folder / name, meshes)]
    in_background = training.manager(folder / f"{name}{ASYNC}", [])
    if ASYNC in forms:
        in_background.saving.save(training.engine, training.state, in_background=True)
    if WEIGHTS in forms:
        # As in an engine of --no-save-optim.
        training.engine._files._saves_optimizer = False
        training.engine._experts._optimizer = None
        manager = training.manager(folder / f"{name}{WEIGHTS}", [], no_save_optim=True)
        manager.saving.save(training.engine, training.state)
    record = {
        "states": training.states(),
        "steps": training.steps(),
        "scale": training.scale(),
        "state": training.state,
        "third": training.third_step(),
    }
    in_background.saving.advance(wait=True)
    if dist.get_rank() == 0:
        torch.save(record, folder / f"{name}.pt")
        if SUFFIX in forms:
            (path,) = list_checkpoints(folder / name)
            target = path.with_name(f"{path.name}{SUFFIX}")
            convert_checkpoint(open_verified(path), target, lambda name, size: None)
    training.close()
    return wrong


def wrong_weights(training: Continued, folder: Path, meshes: Meshes) -> Iterator[str]:
    """Weights that the files do not give bit for bit, complete and in models for generation."""
    (path,) = list_checkpoints(folder)
    found = read_run(path)
    dtype = next(training.ds.module.parameters()).dtype
    saved = {name: tensor.read() for name, tensor in lazy_full_weights(found).items()}
    saved = without_padding(saved)
    # ZeRO-3 saves the values that the weights of the model are rounded from.
    rounded = {name: tensor.to(dtype).float() for name, tensor in saved.items()}
    own = without_padding(full_weights(training.engine, training.mesh)) | training.layer_states()
    yield from differing_names(rounded, own)
    for size in {1, 2} & meshes.keys():
        tp = meshes[size].tp
        device = torch.device("cpu")
        model = load_model(source_of(found), meshes[size], device, precision="fp32")
        parameters = dict(model.named_parameters())
        loaded = full_tensors(parameters, parameters, tp) | dict(model.named_buffers())
        expected = {name: tensor.float() for name, tensor in saved.items()}
        wrong = differing_names(without_padding(loaded), expected)
        yield from (f"{name} on {size} ranks" for name in wrong)


def load_layout(
    name: str, loads: list[tuple[str, str]], folder: Path, meshes: Meshes
) -> dict[tuple[str, str], list[str]]:
    """What differs after each load of a form of a checkpoint: (form, source)."""
    found = {}
    training = Continued(name, folder, meshes)
    for form, source in loads:
        record = torch.load(folder / f"{source}.pt", weights_only=False)
        training.overwrite()
        found[form, source] = list(LOADS[form](training, name, source, record, folder))
    training.close()
    return found


def load_states(
    training: Continued, source: str, record: dict[str, Any], folder: Path, said: str
) -> Iterator[str]:
    """Loads a checkpoint, whose states must be those that were saved.

    Args:
        training: The layout that loads.
        source: The layout that saved.
        record: What it recorded.
        folder: Of the checkpoints.
        said: Part of a message about the load; "": that of a load of the same layout.
    """
    log: list[str] = []
    universal = "universal" in said
    manager = training.manager(folder / source, log, universal_checkpoint=universal)
    checkpoint = manager.restoring.select()
    assert checkpoint is not None
    training.state = manager.restoring.load(training.engine, checkpoint)
    if any((said or "resharded in ") in line for line in log) != (said != ""):
        yield f"log {log}"
    yield from differing_states(training, record["states"])
    if (training.steps() or {STEPS}) != (record["steps"] or {STEPS}):
        yield f"steps {training.steps()} instead of {record['steps']}"
    if training.state != record["state"]:
        yield f"{training.state} instead of {record['state']}"
    both_scaled = "fp16" in source and training.config.precision.fp16
    if both_scaled and training.scale() != record["scale"]:
        yield f"loss scale {training.scale()} instead of {record['scale']}"


def load_one(
    training: Continued, name: str, source: str, record: dict[str, Any], folder: Path
) -> Iterator[str]:
    """Continues a checkpoint; its next step must be that of the run that saved it."""
    (path,) = list_checkpoints(folder / source)
    own = ParallelLayout.of(training.config, training.mesh.dp.size)
    said = "resharded in " if own != read_run(path).run.layout else ""
    yield from load_states(training, source, record, folder, said)
    third = training.third_step()
    expected = record["third"]
    relative = max(LAYOUTS[each].relative for each in (name, source))
    for kind in ("loss", "norm"):
        if third[kind] != pytest.approx(expected[kind], rel=relative):
            yield f"{kind} {third[kind]} instead of {expected[kind]}"
    error, worst = worst_difference(third["weights"], expected["weights"])
    if not error <= relative:
        yield f"{worst} is off by {error:.1e} of the largest after the step"


def load_universal(
    training: Continued, name: str, source: str, record: dict[str, Any], folder: Path
) -> Iterator[str]:
    """Loads the converted checkpoint, which must give the same as the checkpoint itself."""
    return load_states(training, source, record, folder, "from the universal checkpoint")


def load_weights(
    training: Continued, name: str, source: str, record: dict[str, Any], folder: Path
) -> Iterator[str]:
    """Loads a checkpoint without states of the optimizer, whose next step is its first."""
    (path,), (full,) = (list_checkpoints(folder / f"{source}{end}") for end in (WEIGHTS, ""))
    training.engine.reshard(SavedStates(read_run(path), has_optimizer=False))
    sizes = [sum(each.size for each in read_manifest(each).values()) for each in (path, full)]
    if not sizes[0] < 0.75 * sizes[1]:
        yield f"sizes without and with the optimizer {sizes}"
    training.state = record["state"]
    loss = training.third_step()["loss"]
    expected = record["third"]["loss"]
    if loss != pytest.approx(
        expected, rel=IN_HALF_PRECISION if "precision" in source else RELATIVE
    ):
        yield f"loss {loss} instead of {expected} with the weights alone"
    if not training.steps() <= {1}:
        yield f"steps {training.steps()} after the first one"


LOADS = {"": load_one, SUFFIX: load_universal, WEIGHTS: load_weights}
"""By form of a checkpoint, which is the suffix of its folder, how it is loaded and compared."""


def differing_states(training: Continued, saved: dict[str, Tensors]) -> Iterator[str]:
    """States that are not those of the checkpoint bit for bit, in the precision of the run."""
    states = training.states()
    dtype = master_weights(training.ds)[0].dtype
    weight_dtype = next(training.ds.module.parameters()).dtype
    rounded = {
        kind: {name: tensor.to(dtype).float() for name, tensor in tensors.items()}
        for kind, tensors in saved.items()
    }
    rounded["weights"] = {
        name: tensor.to(weight_dtype).float()
        for name, tensor in rounded.get("master", rounded["weights"]).items()
    }
    for kind, tensors in rounded.items():
        if kind not in states and len(states) == 1:
            continue  # not read
        if states[kind].keys() != tensors.keys():
            yield f"{kind}: {sorted(states[kind].keys() ^ tensors.keys())}"
            continue
        for name, tensor in tensors.items():
            if not torch.equal(states[kind][name], tensor):
                yield f"{kind} of {name}"


@dataclass(frozen=True)
class Outcome:
    """Folder of the checkpoints, and what the layouts that save and load returned."""

    folder: Path
    saves: JobResults
    loads: JobResults

    def differences(self, form: str, pairs: Iterable[Pair]) -> list[str]:
        found = []
        for source, target in pairs:
            self.saves.of(source)
            for rank, seen in enumerate(self.loads.of(target)):
                found += [f"{source}, rank {rank}: {each}" for each in seen[form, source]]
        return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Outcome:
    """The saves and loads of the selected tests."""
    loads: dict[str, set[tuple[str, str]]] = {}
    forms: dict[str, set[str]] = {}
    for _, params in selected(request):
        for source, target in params.get("pairs", ()):
            forms.setdefault(source, set()).add(params["form"])
            if params["form"] in LOADS:
                loads.setdefault(target, set()).add((params["form"], source))
    folder = tmp_path_factory.mktemp("checkpoints")
    saving = {world: Jobs() for world in WORLDS}
    loading = {world: Jobs() for world in WORLDS}
    for name, layout in LAYOUTS.items():
        if name in forms:
            saving[layout.world][name] = partial(save_layout, name, forms[name], folder)
        if name in loads:
            loading[layout.world][name] = partial(load_layout, name, sorted(loads[name]), folder)
    return Outcome(folder, run_by_world(saving), run_by_world(loading))


def cases(
    pairs: Iterable[Pair], form: str, marks_of: Callable[[str], Sequence[Any]] = lambda target: ()
) -> list[Any]:
    """Parameters of a test: for each target its pairs, and the form of the checkpoints.

    Args:
        pairs: The pairs.
        form: The form.
        marks_of: Further marks of a target.
    """
    by_target: dict[str, list[Pair]] = {}
    for source, target in pairs:
        by_target.setdefault(target, []).append((source, target))
    found = []
    for target in (name for name in LAYOUTS if name in by_target):
        is_on_disk = any(LAYOUTS[n].changes == NVME for pair in by_target[target] for n in pair)
        marks = [*marks_of(target), *([pytest.mark.libaio] if is_on_disk else [])]
        found.append(pytest.param(form, by_target[target], id=target, marks=marks))
    return found


def mostly_proofs(pairs: Iterable[Pair], form: str, basic: Collection[str]) -> list[Any]:
    """The same if `make test` runs only the targets `basic`."""

    def marks_of(target: str) -> list[Any]:
        return [] if target in basic else [pytest.mark.proof]

    return cases(pairs, form, marks_of)


def last(form: str, basic: Collection[str]) -> list[Any]:
    """Each layout with the checkpoint that it loads in other forms."""
    return mostly_proofs([(source, target) for target, source in LAST.items()], form, basic)


@pytest.mark.parametrize(("form", "pairs"), cases(BASIC, ""))
def test_every_layout_continues_checkpoints_of_others(
    form: str, pairs: list[Pair], outcomes: Outcome
) -> None:
    """Claim (checkpoints): a checkpoint of any layout (tensor-, pipeline-, data-, expert- and
    Ulysses-parallel sizes, ZeRO stage, precision, offload, order of flat tensors; AdamW, SGD, Lion,
    Muon) continues on any other: weights and moments equal bit for bit, the next step to 1e-6 in
    fp32"""
    assert outcomes.differences(form, pairs) == []


@pytest.mark.proof
@pytest.mark.parametrize(("form", "pairs"), cases(FURTHER, ""))
def test_every_layout_continues_further_checkpoints(
    form: str, pairs: list[Pair], outcomes: Outcome
) -> None:
    """Claim (checkpoints): a checkpoint of any layout (tensor-, pipeline-, data-, expert- and
    Ulysses-parallel sizes, ZeRO stage, precision, offload, order of flat tensors; AdamW, SGD, Lion,
    Muon) continues on any other: weights and moments equal bit for bit, the next step to 1e-6 in
    fp32"""
    assert outcomes.differences(form, pairs) == []


@pytest.mark.parametrize(("form", "pairs"), last(SUFFIX, UNIVERSAL))
def test_a_universal_checkpoint_gives_the_states_of_the_checkpoint_itself(
    form: str, pairs: list[Pair], outcomes: Outcome
) -> None:
    """Claim (checkpoints): a checkpoint of any layout, converted to the universal format, gives
    every other layout the same states bit for bit as the checkpoint itself"""
    assert outcomes.differences(form, pairs) == []


@pytest.mark.parametrize(("form", "pairs"), last(WEIGHTS, WITHOUT_OPTIMIZER))
def test_weights_alone_continue_on_any_layout(
    form: str, pairs: list[Pair], outcomes: Outcome
) -> None:
    """Claim (checkpoints): checkpoints without states of the optimizer have the weights of any
    layout, and continue without these states only

    Claim (checkpoints): `--finetune` and `--no-load-optim` take the weights alone, on any layout
    """
    assert outcomes.differences(form, pairs) == []


@pytest.mark.parametrize(
    ("form", "pairs"), mostly_proofs([(name, name) for name in LAYOUTS], ASYNC, IN_BACKGROUND)
)
def test_an_asynchronous_save_writes_the_bytes_of_a_synchronous_one(
    form: str, pairs: list[Pair], outcomes: Outcome
) -> None:
    """Although the states have changed between the copy and the write.

    Claim (checkpoints): asynchronous saves write the files of synchronous ones byte by byte, in
    every layout, precision and offload
    """
    ((name, _),) = pairs
    outcomes.saves.of(name)
    (path,) = list_checkpoints(outcomes.folder / name)
    (other,) = list_checkpoints(outcomes.folder / f"{name}{form}")
    files = read_manifest(path)
    assert len(files) > 1
    assert read_manifest(other).keys() == files.keys()
    assert find_damaged_files(other, read_manifest(other)) == {}
    same = {name for name in files if read_manifest(other)[name] == files[name]}
    assert files.keys() - same <= {"run.json"}, name  # each has a branch of its own


def test_files_give_the_weights_of_the_run(outcomes: Outcome) -> None:
    for name in outcomes.saves.results:
        assert not any(outcomes.saves.of(name)), name


def test_loads_leave_the_checkpoints_as_they_were(outcomes: Outcome) -> None:
    """Claim (checkpoints): resharding leaves the checkpoint as it was"""
    for name in outcomes.saves.results:
        (path,) = list_checkpoints(outcomes.folder / name)
        assert check_names(path) is None
        assert find_damaged_files(path, read_manifest(path)) == {}


def test_every_layout_saves_and_loads() -> None:
    assert [*map(set, zip(*BASIC, *FURTHER, strict=True))] == [set(LAYOUTS)] * 2
    assert {*UNIVERSAL, *WITHOUT_OPTIMIZER, *IN_BACKGROUND} <= LAYOUTS.keys()
