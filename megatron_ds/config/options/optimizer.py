"""Options of the optimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ds.config.fields import ANY_VALUE, UNSET_FLOAT, in_effect, option_field, when
from megatron_ds.config.options import param_group
from megatron_ds.config.options.param_group import ParamGroup
from megatron_ds.config.problems import Problem

MATRIX_BATCH = 2**25
"""Most elements of matrices of one shape that are updated at once, or of a single one."""
EIGHT_BIT, NORMUON = "adam8bit", "normuon"
"""Names of optimizers by their states: Adam with 8-bit moments, and Muon with second moments."""
ADAM = when(optimizer=("adam", "muon", "soap"))
MUON, SOAP = when(optimizer="muon"), when(optimizer="soap")
LION = when(optimizer="lion")

_fraction = functools.partial(option_field, minimum=0, below=1)
_moment = functools.partial(option_field, "fp32", choices=("fp32", "bf16"))
_of_muon = functools.partial(option_field, only_with=MUON)


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer. Biases and one-dimensional weights have no weight decay."""

    optimizer: str = option_field(
        "adam", choices=("adam", "sgd", "lion", "muon", "soap"), synonyms={"dist_muon": "muon"}
    )
    lr: float = option_field(UNSET_FLOAT, required=True, minimum=0)
    adam_beta1: float = _fraction(0.9, only_with=ADAM)
    adam_beta2: float = _fraction(0.999, only_with=ADAM)
    adam_eps: float = option_field(1e-8, minimum=0, only_with=ADAM)
    exp_avg_dtype: str = _moment(only_with=when(optimizer=("adam", "muon", "soap", "lion")))
    exp_avg_sq_dtype: str = _moment(only_with=ADAM)
    use_bnb_optimizer: bool = option_field(False, only_with=when(optimizer="adam"))
    lion_beta1: float = _fraction(0.9, only_with=LION)
    lion_beta2: float = _fraction(0.99, only_with=LION)
    muon_momentum: float = _fraction(0.95, only_with=MUON)
    muon_nesterov: bool = _of_muon(True, flag="muon-no-nesterov")
    muon_num_ns_steps: int = _of_muon(5, minimum=1, maximum=20)
    muon_scale_mode: str = _of_muon(
        "spectral", choices=("spectral", "unit_rms_norm", "shape_scaling")
    )
    muon_extra_scale_factor: float = _of_muon(0.2, above=0)
    muon_coefficient_type: str = _of_muon("simple", choices=("simple", "quintic", "polar_express"))
    normuon: bool = _of_muon(False)
    normuon_beta2: float = _fraction(0.95, only_with=(MUON, when(normuon=True)))
    soap_shampoo_beta: float = _fraction(0.95, only_with=SOAP)
    soap_precondition_frequency: int = option_field(10, minimum=1, only_with=SOAP)
    sgd_momentum: float = _fraction(0.9, only_with=when(optimizer="sgd"))
    qk_clip: bool = option_field(False)
    qk_clip_threshold: float = option_field(100.0, above=0, only_with=when(qk_clip=True))
    qk_clip_alpha: float = option_field(0.5, minimum=0, maximum=1, only_with=when(qk_clip=True))
    decoupled_lr: float | None = option_field(None, minimum=0)
    decoupled_min_lr: float | None = option_field(
        None, minimum=0, only_with=when(decoupled_lr=ANY_VALUE)
    )
    weight_decay: float = option_field(0.01, minimum=0)
    cautious_weight_decay: bool = option_field(
        False, only_with=when(optimizer=("adam", "muon", "soap", "lion"))
    )
    embedding_weight_decay: float | None = option_field(None, minimum=0)
    param_group: tuple[str, ...] | None = option_field(
        None, nargs="*", metavar="GROUP", repeatable=True
    )
    start_weight_decay: float | None = option_field(None, minimum=0)
    end_weight_decay: float | None = option_field(None, minimum=0)
    weight_decay_incr_style: str = option_field(
        "constant", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = option_field(1.0, minimum=0)

    calculate_per_token_loss: bool = option_field(False)

    skip_loss_spikes: float | None = option_field(None, metavar="SIGMA", above=0)
    skip_loss_spikes_window: int = option_field(
        128, minimum=4, only_with=when(skip_loss_spikes=ANY_VALUE)
    )

    @property
    def has_8_bit_moments(self) -> bool:
        return self.optimizer == "adam" and self.use_bnb_optimizer

    @property
    def matrix_states(self) -> int:
        """States of an element of the matrices that are updated as such; 0 if none are."""
        return {"muon": 2 if self.normuon else 1, "soap": 4}.get(self.optimizer, 0)

    @property
    def moment_dtypes(self) -> dict[str, str]:
        """The options of the types of moments, by name, unless all are fp32."""
        options = in_effect(self)
        types = {name: getattr(options, name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
        return {} if set(types.values()) == {"fp32"} else types

    @property
    def states(self) -> str:
        """Name of the optimizer, by which its states are known."""
        if self.has_8_bit_moments:
            return EIGHT_BIT
        return NORMUON if self.optimizer == "muon" and self.normuon else self.optimizer

    @property
    def derived_values(self) -> dict[str, Any]:
        """The bounds of the weight decay schedule, which are --weight-decay if it is constant."""
        is_constant, names = self.weight_decay_incr_style == "constant", ("start", "end")
        return {
            f"{name}_weight_decay": self.weight_decay
            if is_constant
            else getattr(self, f"{name}_weight_decay")
            for name in names
        }

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The values of --param-group."""
        return [ParamGroup.parse(text) for text in self.param_group or ()]

    def warnings(self) -> Iterator[Problem]:
        """Warn of a rate that is most likely a typing error, such as 3e4 for 3e-4."""
        if self.optimizer != "sgd" and self.lr > 1:
            yield Problem("learning-rate-above-one", settings=self)

    def problems(self) -> Iterator[Problem]:
        """Check that a scheduled weight decay has a start and an end, and an embedding's a base."""
        rates = {"lr": self.lr, "weight_decay": self.weight_decay}
        for text, reason in param_group.problems(self.param_group or (), **rates):
            yield Problem("param-group-invalid", text=text, reason=reason)
        if self.embedding_weight_decay and not self.weight_decay:
            yield Problem("embedding-weight-decay-without-weight-decay", settings=self)
        if self.weight_decay_incr_style == "constant":
            for name in ("start_weight_decay", "end_weight_decay"):
                if getattr(self, name) not in (None, self.weight_decay):
                    yield Problem(
                        "constant-weight-decay-changes", name, "weight_decay", settings=self
                    )
        elif self.start_weight_decay is None or self.end_weight_decay is None:
            yield Problem("weight-decay-bounds-required", settings=self)
