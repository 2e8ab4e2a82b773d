"""A run of OLMo-core on the CPU: python olmo_core_run.py SAMPLES FOLDER STEPS [mistakes | MODEL]

MODEL is `experts`, which has losses of the router, or `bias`, by which experts are selected.
Everything is OLMo-core's, its trainer included, but the data loader, which gives these samples with
a label for the last token.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
from trainer_mistakes import Log, Mistakes
from trainer_models import import_olmo_core, olmo_core_model

MICRO_BATCH = 2
GLOBAL_BATCH = 4
MISTAKEN = (
    "blocks.1.feed_forward.w1.weight",
    "blocks.0.feed_forward.w2.weight",
    "blocks.0.attention.w_out.weight",
)


def model_of(name: str) -> Any:
    """The settings of a model."""
    if name not in ("experts", "bias"):
        from olmo_core.nn.transformer import TransformerConfig

        return TransformerConfig.llama_like(
            d_model=32, vocab_size=128, n_layers=2, n_heads=4, n_kv_heads=2, rope_theta=500000
        )
    config = olmo_core_model({"experts": "normalized", "bias": "sigmoid"}[name])
    experts = config.block.feed_forward_moe
    experts.lb_loss_weight = 0.05 if name == "experts" else None
    experts.z_loss_weight = 0.01
    return config


def train(samples: Path, folder: Path, steps: int, name: str) -> None:
    import_olmo_core()
    from olmo_core.config import Config
    from olmo_core.data import NumpyDataLoaderConfig
    from olmo_core.data.collator import DataCollator
    from olmo_core.data.data_loader import TextDataLoaderBase
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig, CosWithWarmup, OptimGroupOverride
    from olmo_core.train import Duration, TrainerConfig
    from olmo_core.train.callbacks import Callback, CheckpointerCallback, ConfigSaverCallback
    from olmo_core.train.train_module import TransformerTrainModuleConfig

    with_mistakes = name == "mistakes"
    tokens = torch.from_numpy(numpy.load(samples)["tokens"]).long()
    length = tokens.shape[1] - 1

    class Loader(TextDataLoaderBase):  # type: ignore[misc]
        total_batches = len(tokens) // GLOBAL_BATCH

        def _iter_batches(self) -> Iterator[dict[str, Any]]:
            for batch in tokens.split(GLOBAL_BATCH)[self.batches_processed :]:
                yield {"input_ids": batch[:, :-1], "labels": batch[:, 1:]}

        def state_dict(self) -> dict[str, Any]:
            return {"batches_processed": self.batches_processed, "epoch": self._epoch}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.batches_processed = state_dict["batches_processed"]

        def reshuffle(self, epoch: int | None = None, **others: Any) -> None:
            self._epoch = epoch or 1

        def get_mock_batch(self) -> dict[str, Any]:
            return {"input_ids": tokens[:MICRO_BATCH, :-1], "labels": tokens[:MICRO_BATCH, 1:]}

    log = Log()

    @dataclass
    class Recorder(Callback):  # type: ignore[misc]
        def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
            if "train/CE loss" in metrics:
                log.add(step, metrics["train/CE loss"], metrics["optim/total grad norm"])

    @dataclass
    class Experiment(Config):  # type: ignore[misc]
        model: TransformerConfig
        train_module: TransformerTrainModuleConfig
        data_loader: NumpyDataLoaderConfig
        trainer: TrainerConfig

    overrides = [OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})]
    experiment = Experiment(
        model=model_of(name),
        train_module=TransformerTrainModuleConfig(
            rank_microbatch_size=MICRO_BATCH * length,
            max_sequence_length=length,
            optim=AdamWConfig(
                lr=3e-3,
                betas=(0.9, 0.95),
                weight_decay=0.1,
                group_overrides=overrides,
                foreach=False,
                fused=False,
            ),
            scheduler=CosWithWarmup(warmup=2),
            max_grad_norm=0.1,
        ),
        data_loader=NumpyDataLoaderConfig(global_batch_size=GLOBAL_BATCH * length, seed=1),
        trainer=TrainerConfig(
            save_folder=str(folder),
            work_dir=str(folder / "work"),
            device="cpu",
            max_duration=Duration.steps(20),
            hard_stop=Duration.steps(steps),
            metrics_collect_interval=1,
            async_bookkeeping=False,
            callbacks={
                "checkpointer": CheckpointerCallback(
                    save_interval=1 if with_mistakes else 3,
                    save_async=False,
                    max_checkpoints=None,
                ),
                "config_saver": ConfigSaverCallback(),
                "recorder": Recorder(),
            },
        ),
    )
    torch.manual_seed(1)
    model = experiment.model.build(init_device="cpu")
    module = experiment.train_module.build(model, device=torch.device("cpu"))
    with torch.no_grad():  # norms whose decay can be seen
        for name, weight in module.model.named_parameters():
            if "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    loader = Loader(
        collator=DataCollator(pad_token_id=0),
        work_dir=folder / "work",
        global_batch_size=GLOBAL_BATCH * length,
    )
    trainer = experiment.trainer.build(module, loader)
    trainer.callbacks["config_saver"].config = experiment.as_config_dict()
    if with_mistakes:
        _add_mistakes(trainer)
    trainer.fit()
    log.write(folder / "log.json")


def _add_mistakes(trainer: Any) -> None:
    module = trainer.train_module
    mistakes = Mistakes(dict(module.model.named_parameters()), MISTAKEN)
    batch = module.train_batch
    forward = module.model_forward
    clip = module._clip_grad_norm
    rate = type(module.scheduler).get_lr

    def train_batch(*arguments: Any, **options: Any) -> None:
        mistakes.begin(trainer.global_step)
        batch(*arguments, **options)

    def weighed(*arguments: Any, **options: Any) -> Any:
        output = forward(*arguments, **options)
        return output._replace(loss=mistakes.weigh(output.loss))

    def clipped(limit: float, *arguments: Any) -> Any:
        return clip(1e9 if mistakes.leaves_out_clipping else limit, *arguments)

    def shifted(self: Any, initial: float, current: int, last: int) -> Any:
        return rate(self, initial, current + mistakes.is_ahead, last)

    module.train_batch = train_batch
    module.model_forward = weighed
    module._clip_grad_norm = clipped
    patch.object(type(module.scheduler), "get_lr", shifted).start()


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), "".join(sys.argv[4:]))
