"""Mixtures of experts train like one process: capacities, layers without experts, one expert per
rank, five steps of a plain loop. `test_layouts.py` has every pair with other options.

The reference computes the same micro-batches, because the load-balancing loss and the capacity of
experts are those of a micro-batch. It uses the layer itself, in one process, or a loop over
experts; `tests/unit/model/test_moe.py` compares one with the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.checkpoint.files.full_weights import lazy_full_weights
from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import check_names, read_manifest, read_run
from megatron_ds.checkpoint.run_checkpoints import RunCheckpoints
from megatron_ds.config import CheckpointConfig
from megatron_ds.conversion.native import source_of
from megatron_ds.engine.deepspeed.tensor_files import read_tensors
from megatron_ds.engine.readback import master_weights
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.inference.load_checkpoint import load_model
from megatron_ds.model.moe import MoE
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.sharding import expert_group
from tests.dist.compare import differing_names, norm_of
from tests.dist.engine_harness import Meshes, batches_of, build, full_weights, train
from tests.dist.nonfinite_harness import Training
from tests.dist.parity_cases import (
    OPTIMIZERS,
    SAMPLES,
    STEPS,
    Case,
    Changes,
    config_of,
    is_global,
    plans_of,
    samples_of,
    train_alone,
)
from tests.dist.rank_jobs import JobResults, Jobs, case_training, run_by_world, selected
from tests.dist.recorded import Replay
from tests.dist.reference import Run, Tensors
from tests.independent.model import DEFAULTS, Experts
from tests.proofs.cases import with_proofs
from tests.tables import UniqueNames, tables

TABLES = tables(__file__, tuple)

FOUR = TABLES["four"]
HALF_ERROR = 2e-2
"""Of losses and norms; an expert that counts twice, or not at all, changes the norm by more."""
ROUTER_ERROR = 0.15
"""Of a router's gradient in bf16 or fp16; without the auxiliary losses it is larger."""


def layout(
    moe: Mapping[str, Any] = FOUR, changes: Changes = MappingProxyType({}), **row: Any
) -> Case:
    """A layout with experts."""
    return Case(changes={"moe": moe, **changes}, **row)


class LoopOverExperts(Replay):
    """Computes the reference's mixtures by a loop over all experts, which exchanges nothing."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def deciding(self, model: nn.Module) -> Iterator[None]:
        for layer in model.modules():
            if isinstance(layer, MoE):
                layer.forward = partial(mix_in_a_loop, layer)  # type: ignore[method-assign]
        yield


def mix_in_a_loop(layer: MoE, x_SBH: torch.Tensor) -> torch.Tensor:
    options = {**DEFAULTS, "activation": "gelu", "add_bias_linear": True, **vars(layer.moe)}
    weights = {f"mlp.{name}": tensor for name, tensor in layer.named_parameters()}
    weights |= {f"mlp.{name}": tensor for name, tensor in layer.named_buffers()}
    mix = Experts(SimpleNamespace(**options | {"num_experts": layer.moe.experts}), weights)
    y = mix(x_SBH.double().transpose(0, 1), "mlp").transpose(0, 1)
    layer.router.assigned_E = layer.router.assigned_E + mix.counts["mlp"]
    return layer.log.add_gradient(y.float(), mix.auxiliary.float())


IN_STAGES = "two stages, the first without experts"
CASES, HALF, OTHERS = (
    {name: layout(**row) for name, row in TABLES[table].items()}
    for table in ("cases", "half", "others")
)
"""Those of the training, those in half precision, and those of the tests below alone."""
EVERYTHING = UniqueNames([*CASES.items(), *HALF.items(), *OTHERS.items()])
NONFINITE = TABLES["nonfinite"]
UNUSED = TABLES["unused"]
RESUMED = TABLES["resumed"]
TRAINED_IN_PROOFS = TABLES["trained_in_proofs"]
HALF_IN_PROOFS = tuple(HALF)[1:]
SKIPPED_IN_PROOFS = (NONFINITE[1], *NONFINITE[3:])
UNUSED_IN_PROOFS = UNUSED[1:]
RESUMED_IN_PROOFS = RESUMED[1:]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> JobResults:
    """The jobs of the selected tests, by one set of two ranks and one of four."""
    jobs = {2: Jobs(), 4: Jobs()}
    for test, params in selected(request):
        name = params["name"]
        case = EVERYTHING[name]
        world = case.world
        if test == test_a_nonfinite_gradient_of_an_expert_skips_the_step_on_all_ranks.__name__:
            jobs[world][f"skip {name}"] = partial(skip, case)
        elif test == test_experts_without_tokens_have_zero_gradients.__name__:
            jobs[world][f"unused {name}"] = partial(use_one_expert, case)
        elif test in (
            test_a_resumed_run_continues_bit_for_bit.__name__,
            test_a_checkpoint_has_each_expert_once_and_the_model_of_the_run.__name__,
        ):
            folder = tmp_path_factory.getbasetemp() / f"resume {name}"
            jobs[4].setdefault(f"resume {name}", partial(resume, case, str(folder)))
        else:
            jobs[world].setdefault(name, case_training(case))
    return run_by_world(jobs)


@pytest.mark.parametrize("name", with_proofs(CASES, TRAINED_IN_PROOFS))
def test_experts_train_like_one_process(name: str, results: JobResults) -> None:
    """Claim (parallel): experts on every rank, or distributed over 2 or 4, train exactly like a
    single process, with ZeRO, tensor parallelism, Ulysses, pipeline stages and Muon; with tensor
    parallelism also as a plain loop over experts, five steps"""
    case = CASES[name]
    is_long = len(case.lengths) > STEPS
    reference = train_alone(case, LoopOverExperts() if is_long else None)
    clip = OPTIMIZERS[case.optimizer].clip_grad
    assert all(norm is not None and norm > 2 * clip for norm in reference.norms)
    assert results.differences(name, reference) == []
    for run in results.of(name):
        for step, expected in zip(run.routing, reference.routing, strict=True):
            if is_global(case):  # the reference's micro-batches are those of all ranks
                _ = step.pop("max_expert_load"), expected.pop("max_expert_load", None)
            if expected:
                assert step == pytest.approx(expected, rel=1e-5)
        assert run.notes["params norm"] == pytest.approx(norm_of(reference.weights[-1]), rel=1e-5)


@pytest.mark.parametrize("name", with_proofs(HALF, HALF_IN_PROOFS))
def test_experts_in_half_precision_have_the_norm_of_one_process(
    name: str, results: JobResults
) -> None:
    """Claim (parallel): the gradient norm counts every expert once in bf16 and fp16, too"""
    reference = train_alone(HALF[name])
    for run in results.of(name):
        assert run.losses == pytest.approx(reference.losses, rel=HALF_ERROR)
        assert run.norms == pytest.approx(reference.norms, rel=HALF_ERROR)
        # Recorded as autograd gives them, so with the loss scale.
        scale = norm_of(run.gradients[0]) / norm_of(reference.gradients[0])
        for name, expected in reference.gradients[0].items():
            if name.endswith("router.weight"):
                error = (run.gradients[0][name] / scale - expected).norm() / expected.norm()
                assert error < ROUTER_ERROR, name


def skip(case: Case, meshes: Meshes) -> tuple[bool, bool, bool]:
    """Whether a step is skipped, the weights kept, and the next step applied."""
    config = config_of(case)
    plan, *_ = plans_of(case)
    mesh = meshes.of(config.parallel)
    engine = build(config, mesh)
    before = full_weights(engine, mesh)
    batches = batches_of(config, mesh, SAMPLES)
    parameters = engine._engine.module.parameters()
    experts = [each for each in parameters if expert_group(each) is not None]
    factor = float("nan") if mesh.rank == mesh.world_size - 1 else 1.0
    hooks = [each.register_hook(lambda grad: grad * factor) for each in experts[:1]]
    skipped = engine.train_step(batches, plan).skipped
    for hook in hooks:
        hook.remove()
    after = full_weights(engine, mesh)
    kept = differing_names(before, after) == []
    applied = not engine.train_step(batches, plan).skipped
    engine._engine.destroy()
    return skipped, kept, applied


@pytest.mark.parametrize("name", with_proofs(NONFINITE, SKIPPED_IN_PROOFS))
def test_a_nonfinite_gradient_of_an_expert_skips_the_step_on_all_ranks(
    name: str, results: JobResults
) -> None:
    """On the last rank, of an expert that only some ranks have.

    Claim (parallel): a non-finite gradient of an expert on one rank skips the step on all, and
    experts without tokens have gradients of zeros
    """
    world = EVERYTHING[name].world
    assert results.of(f"skip {name}") == [(True, True, True)] * world


def use_one_expert(case: Case, meshes: Meshes) -> tuple[Run, list[list[bool]]]:
    """One step in which every token selects the same experts; and whether each expert then has a
    gradient, by parameter."""
    config = config_of(case)
    plans = plans_of(case)[:1]
    found: list[list[bool]] = []

    def probe(engine: Any) -> None:
        for name, parameter in engine.module.named_parameters():
            if name.endswith("router.weight"):
                parameter.data.zero_()

    run = train(config, plans, samples_of(case), probe, meshes)
    for name, gradient in run.gradients[0].items():
        if ".experts." in name:
            found.append([bool(expert.count_nonzero()) for expert in gradient])
    return run, found


@pytest.mark.parametrize("name", with_proofs(UNUSED, UNUSED_IN_PROOFS))
def test_experts_without_tokens_have_zero_gradients(name: str, results: JobResults) -> None:
    """Also where all experts of a rank are without tokens.

    Claim (parallel): a non-finite gradient of an expert on one rank skips the step on all, and
    experts without tokens have gradients of zeros
    """
    config = config_of(EVERYTHING[name])
    size = config.moe.experts
    topk = config.moe.moe_router_topk
    for run, found in results.of(f"unused {name}"):
        assert found
        assert all(sum(used) == topk for used in found)
        assert run.routing[0]["max_expert_load"] == pytest.approx(size / topk)
        assert math.isfinite(run.norms[0])


def resume(case: Case, folder: str, meshes: Meshes) -> dict[str, Any]:
    """Saves after two steps; what the third step gives then and after a load."""
    options = CheckpointConfig(save=folder, load=folder)
    config = dataclasses.replace(config_of(case), checkpoint=options)
    mesh = meshes.of(config.parallel)
    first = Training(config, mesh, STEPS)
    for _ in range(2):
        first.step()
    engine = first.engine
    folders = RunFolders.local(options)
    run = RunCheckpoints(config, mesh, lambda _: None, CollectiveIO(), folders)
    manager = CheckpointManager(run)
    manager.saving.save(engine, first.state)
    seen = {"own": full_weights(engine, mesh), "loss": evaluate(first)}
    seen["recorded sizes"] = [partition.size for partition in engine.partitions()]
    seen["sizes"] = [
        size for sizes in gather_objects(flat_sizes(engine), mesh.pp) for size in sizes
    ]
    seen["continued"] = last_step(first)

    found = manager.restoring.select()
    assert found is not None
    second = Training(config, mesh, STEPS)
    second.state = manager.restoring.load(second.engine, found)
    second.batches = batches_of(config, mesh, SAMPLES, second.state.consumed_samples)
    seen["loaded"] = full_weights(second.engine, mesh)
    seen["resumed"] = last_step(second)
    seen["folder"] = found.path
    return seen


def flat_sizes(engine: ZeroEngine) -> list[int]:
    """Elements of the tensors whose states the optimizer saves."""
    if engine.settings.zero_stage > 0:
        return [weights.numel() for weights in master_weights(engine._engine)]
    groups = engine._engine.basic_optimizer.param_groups
    return [sum(parameter.numel() for parameter in group["params"]) for group in groups]


def evaluate(training: Training) -> float:
    """The loss of this rank's first micro-batch."""
    loss = training.engine.eval_loss(batches_of(training.config, training.mesh, SAMPLES), 1)
    return float(loss.total) / float(loss.weight)


def last_step(training: Training) -> tuple[float, float, Tensors]:
    """Loss, norm and the weights after it."""
    result = training.step()
    assert result.grad_norm is not None
    weights = full_weights(training.engine, training.mesh)
    training.close()
    return float(result.loss), float(result.grad_norm), weights


@pytest.mark.parametrize("name", with_proofs(RESUMED, RESUMED_IN_PROOFS))
def test_a_resumed_run_continues_bit_for_bit(name: str, results: JobResults) -> None:
    """Claim (parallel): a checkpoint has every expert once, and a resumed run continues bit for
    bit"""
    for seen in results.of(f"resume {name}"):
        assert seen["recorded sizes"] == seen["sizes"]
        assert differing_names(seen["loaded"], seen["own"]) == []
        assert seen["resumed"][:2] == seen["continued"][:2]
        assert differing_names(seen["resumed"][2], seen["continued"][2]) == []


@pytest.mark.parametrize("name", with_proofs(RESUMED, RESUMED_IN_PROOFS))
def test_a_checkpoint_has_each_expert_once_and_the_model_of_the_run(
    name: str, results: JobResults
) -> None:
    """Claim (parallel): a checkpoint has every expert once, and a resumed run continues bit for
    bit"""
    seen = results.of(f"resume {name}")
    (first, *_) = seen
    path: Path = first["folder"]
    assert check_names(path) is None
    case = EVERYTHING[name]
    elements = 0
    for file in read_manifest(path):
        if "model_states" in file:
            content = read_tensors(path / file)
            content = content.get("module", content)
            elements += sum(v.numel() for n, v in content.items() if ".experts." in n)
    biases = sum(v.numel() for n, v in first["own"].items() if n.endswith("experts.fc_out.bias"))
    once = sum(v.numel() for n, v in first["own"].items() if ".experts." in n)
    assert elements == once + (case.tp - 1) * biases  # on every tensor-parallel rank
    found = read_run(path)
    weights = {n: v.read().float() for n, v in lazy_full_weights(found).items()}
    states = [name for name in weights if name.endswith("router.expert_bias")]
    assert bool(states) == bool(case.changes["moe"].get("moe_router_enable_expert_bias"))
    own = first["own"] | {name: weights[name] for name in states}
    assert differing_names(weights, own) == []
    model = load_model(source_of(found), Mesh.single(), torch.device("cpu"))
    of_first_stage = len(seen) // case.pp
    for dp_rank, one in enumerate(seen[: of_first_stage : case.tp]):
        size = case.micro_batch_size
        tokens = SAMPLES.batch(dp_rank * size, size)
        with torch.no_grad():
            loss = model(tokens[:, :-1], tokens[:, 1:]).mean()
        assert float(loss) == pytest.approx(one["loss"], rel=1e-2 if "bf16" in name else 1e-5)
