"""The training loop, and what it is put together from."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_ds import schedules
from megatron_ds.checkpoint.manager import CheckpointManager, SaveError
from megatron_ds.checkpoint.metadata import CheckpointMetadata
from megatron_ds.checkpoint.selection import latest_before
from megatron_ds.checkpoint.storage import write_json
from megatron_ds.config import Config
from megatron_ds.data.blend_history import BlendHistory
from megatron_ds.data.build_datasets import Datasets, build_datasets
from megatron_ds.data.micro_batches import MicroBatchIterator
from megatron_ds.data.usage_report import (
    USAGE_FILE,
    as_json,
    describe_blend,
    summary,
)
from megatron_ds.engine.build import build_engine
from megatron_ds.engine.deepspeed_patches import require_precision
from megatron_ds.engine.protocol import Engine
from megatron_ds.launch import device, distributed, output
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.lifecycle import ProcessLifecycle
from megatron_ds.launch.startup_timer import StartupTimer
from megatron_ds.model.flops import model_flops_per_sample
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.train_state import TrainState
from megatron_ds.training.evaluate import evaluate
from megatron_ds.training.exit_conditions import ExitConditions, StopDecision
from megatron_ds.training.loggers import open_sinks
from megatron_ds.training.metrics import Metrics, ThroughputModel
from megatron_ds.training.records import Logger
from megatron_ds.training.skipped_steps import SkippedSteps
from megatron_ds.training.startup_report import (
    MemoryReport,
    estimate_memory,
    print_arguments,
    print_banner,
)


@dataclass
class Trainer:
    """Everything of a run, put together; `run` trains. `state` is the only thing that changes."""

    config: Config
    mesh: Mesh
    engine: Engine
    data: Datasets
    metrics: Metrics
    checkpoints: CheckpointManager
    exits: ExitConditions
    state: TrainState
    total_iterations: int
    eod: int | None
    startup: StartupTimer = field(default_factory=StartupTimer)
    memory: MemoryReport | None = None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.first_iteration = self.state.iteration + 1
        self.skips = SkippedSteps(self.config.precision, self.engine)

    def run(self) -> ExitCode:
        """Trains to the end, or to a reason to end early; saves; evaluates at the end."""
        saved = self.state.iteration
        end = self.exits.external_stop(saved)
        batches = self._batches()
        _log_timestamp("before the start of training step")
        while self.state.iteration < self.total_iterations and end is None:
            self._step(batches)
            end = self.exits.after_step(self.state.iteration)
            last = self.state.iteration == self.total_iterations
            if last and end is not None and not end.urgent:
                end = None  # it ends anyway, and in order
            evaluates = is_due(self.state.iteration, self.config.logging.eval_interval)
            if evaluates and (end is None or not end.urgent):
                end = self._evaluate("validation", f"iteration {self.state.iteration}") or end
            if (
                last
                or end is not None
                or is_due(self.state.iteration, self.config.checkpoint.save_interval)
            ):
                saved = self._save(saved, final=last or end is not None)
                end = end or self.exits.external_stop(self.state.iteration)
        batches.close()
        self.metrics.flush()
        self._report_memory()
        if end is None:
            _log_timestamp("after training is done")
            end = self._evaluate("validation", "the end of training for val data")
            end = end or self._evaluate("test", "the end of training for test data")
        if end is not None:
            output.print_on_rank(end.words)
        self.metrics.close()
        return ExitCode.FINISHED if end is None else end.code

    def _step(self, batches: MicroBatchIterator) -> None:
        plan = schedules.plan(self.config, self.state, self.mesh.dp.size)
        compiled = self._compiled_graphs()
        start = self.clock()
        try:
            with self.skips.record_gradients():
                result = self.engine.train_step(batches, plan)
        except StopIteration:
            raise ValueError(
                f"the training data ends in iteration {plan.iteration}: it was laid out for fewer "
                "samples than this run takes"
            ) from None
        seconds = self.clock() - start
        self.state = self.state.advance(plan, result)
        # The first step of a process fills caches, and compiling is no training.
        warm_up = plan.iteration == self.first_iteration or self._compiled_graphs() > compiled
        self.metrics.record(self.state, plan, result, seconds, warm_up=warm_up)
        self._report(plan.iteration)
        if self.skips.limit_reached(result):
            self.metrics.flush()
            folders = [self.config.checkpoint.save, self.config.checkpoint.load]
            raise self.skips.make_error(
                plan, result, self.state, latest_before(folders, plan.iteration)
            )

    def _report(self, iteration: int) -> None:
        """The start after the first step, and the memory after the first log interval."""
        if iteration == self.first_iteration:
            self.startup.mark("first iteration")
            output.print_on_rank(self.startup.summary_line())
        interval = self.config.logging.log_interval
        if is_due(iteration, interval) and iteration - self.first_iteration < interval:
            self._report_memory()

    def _report_memory(self) -> None:
        if self.memory is not None:
            output.print_on_rank(self.memory.line(self.state.iteration))

    def _compiled_graphs(self) -> int:
        if not self.config.runtime.compile:
            return 0
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])

    def _batches(self) -> MicroBatchIterator:
        assert self.data.train is not None
        return MicroBatchIterator(
            self.data.train,
            consumed=self.state.consumed_samples,
            micro_batch_size=_required(self.config.schedule.micro_batch_size),
            dp_rank=self.mesh.dp.rank,
            dp_size=self.mesh.dp.size,
            num_workers=self.config.data.num_workers,
            eod=self.eod,
        )

    def _evaluate(self, split: str, where: str) -> StopDecision | None:
        """Of every group of data. Gives the reason, if the run is to end at once: the evaluation
        ends without a result."""
        groups = self.data.valid if split == "validation" else self.data.test
        end: StopDecision | None = None

        def stopped() -> bool:
            nonlocal end
            end = self.exits.external_stop(self.state.iteration)
            return end is not None

        for name, dataset in groups.items():
            loss = evaluate(
                self.engine,
                dataset,
                self.mesh,
                samples=self.config.logging.eval_iters
                * self.config.final_global_batch_size(self.mesh.dp.size),
                micro_batch_size=_required(self.config.schedule.micro_batch_size),
                eod=self.eod,
                mean_over_dp=_MeanOver(self.mesh),
                stopped=stopped,
            )
            if loss is None:
                break
            self.metrics.log_eval(self.state, split, where, loss, name)
        return end

    def _save(self, saved: int, *, final: bool) -> int:
        """Saves unless this iteration is saved already; gives the last saved iteration.

        final: the run ends with it, so that there is nothing to go on to if the disk has an error.
        """
        if self.config.checkpoint.save is None or saved == self.state.iteration:
            return saved
        self.metrics.write_pending()
        try:
            self.checkpoints.save(self.engine, self.state, self._blend_history)
        except SaveError as error:
            if final or self.config.checkpoint.on_save_error == "exit":
                raise
            output.print_on_rank(f"WARNING: {error}. Training goes on (--on-save-error continue)")
            return saved
        return self.state.iteration

    def _blend_history(self) -> BlendHistory:
        assert self.data.progress is not None
        return self.data.progress.history_after(self.state.consumed_samples)


def pretrain(config: Config, life: ProcessLifecycle, startup: StartupTimer) -> ExitCode:
    """Runs a training from the configuration of one process of the launched group.

    Whatever goes wrong leaves here as an exception: the group is left by those alone that end in
    order.
    """
    tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size)
    config = config.with_vocab(tokenizer.vocab_size)
    require_precision(config.precision)
    here = distributed.init_distributed(config.runtime)
    life.on_group_joined(*distributed.exchange_process_info())
    startup.mark("process group")
    trainer = build_trainer(config, tokenizer, here, life, startup)
    life.on_training_started()
    code = trainer.run()
    dist.barrier()
    life.on_finished()
    distributed.destroy_process_group()
    return code


def build_trainer(
    config: Config,
    tokenizer: Tokenizer,
    here: distributed.ProcessContext,
    life: ProcessLifecycle,
    startup: StartupTimer,
) -> Trainer:
    """Puts a run together: data, model and engine, checkpoint, sinks. Collective."""
    mesh = Mesh.build(
        config.parallel.tensor_model_parallel_size,
        timeout=timedelta(minutes=config.runtime.distributed_timeout_minutes),
    )
    dp_size = mesh.dp.size
    print_arguments(config, here, mesh)
    checkpoints = CheckpointManager(config, mesh, output.print_on_rank)
    found: CheckpointMetadata | None = None
    if config.checkpoint.load is not None:
        found = checkpoints.select()
        startup.mark("checkpoint's check")
    data = _build_data(config, tokenizer, dp_size, found)
    _log_timestamp("after dataloaders are built")
    startup.mark("data")
    peak = device.PeakMemory()
    engine = build_engine(config, mesh, here.device, tokenizer.eod)
    startup.mark("model and engine")
    output.print_on_rank(
        f" > number of parameters on (tensor, pipeline) model parallel rank "
        f"({mesh.tp.rank}, {mesh.pp.rank}): {engine.parameter_count()}"
    )
    state = TrainState()
    if found is not None:
        state = checkpoints.load(engine, found)
        startup.mark("checkpoint")
    _log_timestamp("after model, optimizer, and learning rate scheduler are built")
    estimate = estimate_memory(config, mesh, engine, here.device.type)
    print_banner(config, here, mesh, engine, state, estimate)
    if config.checkpoint.save is not None and here.is_first:
        Path(config.checkpoint.save).mkdir(parents=True, exist_ok=True)
        checkpoints.warn_of_newer(state)
        write_json(Path(config.checkpoint.save) / "ds_config.json", engine.ds_config)
        write_json(Path(config.checkpoint.save) / USAGE_FILE, as_json(data.shares))
    return Trainer(
        config=config,
        mesh=mesh,
        engine=engine,
        data=data,
        metrics=_metrics(config, mesh, engine, state, here),
        checkpoints=checkpoints,
        exits=ExitConditions(config.logging, life.stop_request, here.device, life.started_at),
        state=state,
        total_iterations=(
            state.iteration
            if config.logging.skip_train
            else schedules.total_iterations(config, dp_size, state)
        ),
        eod=tokenizer.eod if config.data.eod_mask_loss else None,
        startup=startup,
        memory=MemoryReport(engine, estimate, here.device.type == "cpu", peak),
    )


class _MeanOver:
    """Element-wise mean over the data-parallel ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self._group = mesh.dp

    def __call__(self, values: list[float]) -> list[float]:
        if self._group.size == 1:
            return values
        gathered: list[list[float]] = [[] for _ in range(self._group.size)]
        dist.all_gather_object(gathered, values, group=self._group.handle)
        return [sum(column) / len(column) for column in zip(*gathered, strict=True)]


def _build_data(
    config: Config, tokenizer: Tokenizer, dp_size: int, found: CheckpointMetadata | None
) -> Datasets:
    """found: the checkpoint from which the run goes on, if there is one."""
    output.print_on_rank(" > building train, validation, and test datasets for GPT ...")
    state = TrainState() if found is None else found.run.state
    wanted = schedules.planned_samples(config, dp_size, state)
    for name, samples in zip(("train", "validation", "test"), wanted, strict=True):
        output.print_on_rank(f"    {name + ':':<12}{samples}")
    save = config.checkpoint.save
    built = build_datasets(
        config.data,
        seq_length=config.model.sequence,
        seed=config.runtime.seed,
        num_samples=wanted,
        tokenizer_fingerprint=tokenizer.fingerprint.digest,
        vocab_size=tokenizer.vocab_size,
        fallback_cache=None if save is None else str(Path(save) / "index-cache"),
        history=None if found is None else found.run.data,
        consumed=state.consumed_samples,
    )
    full_list = None if save is None else str(Path(save) / USAGE_FILE)
    for line in summary(built.shares, full_list):
        output.print_on_rank(f"    {line}")
    if built.progress is not None and len(built.progress.history.phases) > 1:
        output.print_on_rank(f"    {describe_blend(built.progress.history)}")
    if built.changes:
        output.print_on_rank("\n".join(built.changes))
    return built


def _metrics(
    config: Config, mesh: Mesh, engine: Engine, state: TrainState, here: distributed.ProcessContext
) -> Metrics:
    padded = config.model.padded_vocab(mesh.tp.size)
    sinks: list[Logger] = []
    if here.is_last:
        sinks = open_sinks(
            config,
            state,
            world_size=here.world_size,
            dp_size=mesh.dp.size,
            write=lambda text: output.print_on_rank(text, rank_to_print=-1),
            memory=device.device_memory,
        )
    return Metrics(
        ThroughputModel(
            flops_per_sample=lambda tokens: model_flops_per_sample(
                dataclasses.replace(config.model, seq_length=tokens), padded
            ),
            seq_length=config.model.sequence,
            world_size=here.world_size,
            curriculum=config.schedule.curriculum_seqlen is not None,
        ),
        log_interval=config.logging.log_interval,
        total_iterations=schedules.total_iterations(config, mesh.dp.size, state),
        mean_over_dp=_MeanOver(mesh),
        params_norm=engine.params_norm if config.logging.log_params_norm else None,
        sinks=sinks,
    )


def _log_timestamp(what: str) -> None:
    output.print_on_rank(f"[{what}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}")


def is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0


def _required(value: int | None) -> int:
    assert value is not None
    return value
