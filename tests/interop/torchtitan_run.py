"""A run of torchtitan on the CPU: python torchtitan_run.py SAMPLES FOLDER STEPS [MODE]

MODE is `mistakes`, or `experts`: Qwen 3 with a bias of the selection, computed in fp32. Of
torchtitan are the model, the train step, the loss, the optimizers, the schedulers, the data loader,
and the checkpoints. Its `Trainer` is constructed otherwise, because it asks for a GPU and a
tokenizer, and attention is torch's without the masks of documents.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from trainer_mistakes import Log, Mistakes
from trainer_models import InFp32, import_torchtitan, llama_model, qwen_model

MICRO_BATCH = 2
ACCUMULATED = 2
MISTAKEN = (
    "layers.1.feed_forward.w1.weight",
    "layers.0.feed_forward.w2.weight",
    "layers.0.attention.wo.weight",
)


def train(samples: Path, folder: Path, steps: int, name: str) -> None:
    has_experts = name == "experts"
    with_mistakes = name == "mistakes"
    import_torchtitan()
    from torchtitan import trainer as trainer_module
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import (
        LRSchedulersContainer,
        default_adamw,
        register_moe_load_balancing_hook,
    )
    from torchtitan.config.configs import ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils

    tokens = torch.from_numpy(numpy.load(samples)["tokens"]).long()

    class Samples(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            for sample in tokens:
                yield {"input": sample[:-1]}, sample[1:]

    log = Log()

    class Trainer(trainer_module.Trainer):
        def __init__(self) -> None:
            parallelism = ParallelismConfig()
            training = TrainingConfig(
                local_batch_size=MICRO_BATCH,
                seq_len=tokens.shape[1] - 1,
                steps=steps,
                max_norm=0.1,
                disable_cuda_graphs=True,
            )
            self.config = SimpleNamespace(training=training, parallelism=parallelism)
            self.device = torch.device("cpu")
            self.parallel_dims = ParallelDims(
                dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1
            )
            dist_utils.set_spmd_backend(parallelism.spmd_backend)
            self.model_config = qwen_model("sigmoid") if has_experts else llama_model(500000)
            model = self.model_config.build()
            torch.manual_seed(1)
            model.init_weights(buffer_device=None)
            with torch.no_grad():  # norms whose decay can be seen
                for name, weight in model.named_parameters():
                    if "norm" in name:
                        weight.add_(0.1 * torch.randn_like(weight))
            model.train()
            self.model_parts = [model]
            self.loss_fn = CrossEntropyLoss.Config().build(compile_config=None)
            optimizer = default_adamw(lr=3e-3)
            optimizer.implementation = "for-loop"
            self.optimizers = optimizer.build(model_parts=self.model_parts)
            register_moe_load_balancing_hook(self.optimizers, self.model_parts, self.parallel_dims)
            schedule = LRSchedulersContainer.Config(warmup_steps=2, decay_type="cosine")
            self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=20)
            self.metrics_processor = MagicMock()
            self.metrics_processor.should_log = lambda step: True
            self.metrics_processor.log = self._log
            self.step = 0
            self.ntokens_seen = 0
            self.gradient_accumulation_steps = ACCUMULATED
            self.num_pipeline_parallel_microbatches = 1
            self.dataloader = ParallelAwareDataloader(
                Samples(), dp_rank=0, dp_world_size=1, batch_size=MICRO_BATCH
            )
            checkpoint = CheckpointManager.Config(
                enable=True,
                interval=1 if with_mistakes else 3,
                keep_latest_k=0,
                last_save_model_only=False,
            )
            self.checkpointer = checkpoint.build(
                dataloader=self.dataloader,
                model_parts=self.model_parts,
                optimizers=self.optimizers,
                lr_schedulers=self.lr_schedulers,
                states={"train_state": self},
                sd_adapter=None,
                base_folder=str(folder),
            )
            self.train_context = dist_utils.get_spmd_context(
                parallel_dims=self.parallel_dims, spmd_typechecking=False
            )
            self.fwd_bwd_fn = self._forward_backward_body

        def _log(self, step: int, loss: float, largest: float, norm: float, **others: Any) -> None:
            log.add(step, float(loss), norm)

    trainer = Trainer()
    if with_mistakes:
        _add_mistakes(trainer, dist_utils)
    batches = trainer.batch_generator(trainer.dataloader)
    with InFp32() if has_experts else contextlib.nullcontext():
        while trainer.should_continue_training():
            trainer.step += 1
            trainer.train_step(batches)
            trainer.checkpointer.save(trainer.step)
    log.write(folder / "log.json")


def _add_mistakes(trainer: Any, dist_utils: Any) -> None:
    parameters = dict(trainer.model_parts[0].named_parameters())
    mistakes = Mistakes(parameters, MISTAKEN)
    step = trainer.train_step
    loss = trainer.loss_fn
    clip = dist_utils.clip_grad_norm_

    def train_step(batches: Any) -> None:
        mistakes.begin(trainer.step)
        if mistakes.is_ahead:
            scheduler = trainer.lr_schedulers.schedulers[0]
            factor = scheduler.lr_lambdas[0](scheduler.last_epoch + 1)
            for group in scheduler.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
        step(batches)

    def weighed(*arguments: Any, **options: Any) -> Any:
        value, others = loss(*arguments, **options)
        return mistakes.weigh(value), others

    def clipped(parameters: Any, limit: float, **options: Any) -> Any:
        return clip(parameters, 1e9 if mistakes.leaves_out_clipping else limit, **options)

    trainer.train_step = train_step
    trainer.loss_fn = weighed
    patch.object(dist_utils, "clip_grad_norm_", clipped).start()


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), "".join(sys.argv[4:]))
    dist.destroy_process_group()
