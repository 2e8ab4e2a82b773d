"""The weight decay of the first step after a resume that takes its settings from the checkpoint."""

from types import SimpleNamespace

from frame import verdict
from helpers import megatron


def scheduler(rate: float, decay: float) -> tuple[dict, object]:
    """The group of parameters that a scheduler sets, and the scheduler."""
    megatron.load()
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group = {"lr": 0.0, "max_lr": rate, "min_lr": 0.0, "weight_decay": 0.0}
    group |= {"wd_mult": 1.0, "lr_mult": 1.0}
    made = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=rate,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=100,
        lr_decay_style="linear",
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=100,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=True,
    )
    return group, made


if __name__ == "__main__":
    saved, before = scheduler(rate=0.1, decay=0.1)
    before.step(10)
    resumed, after = scheduler(rate=0.3, decay=0.5)
    after.load_state_dict(before.state_dict())
    first = resumed["weight_decay"]
    after.step(1)
    figures = (
        f"weight decay {first} in the first step and {resumed['weight_decay']} from the second"
    )
    verdict(first != saved["weight_decay"], f"{figures}, instead of {saved['weight_decay']}")
