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

MUON_BATCH = 2**25
"""Most elements of matrices of one shape that Muon orthogonalizes at once, or of a single one."""
EIGHT_BIT, NORMUON = "adam8bit", "normuon"
"""Names of optimizers by their states: Adam with 8-bit moments, and Muon with second moments."""
ADAM = when(optimizer=("adam", "muon"))
MUON = when(optimizer="muon")
LION = when(optimizer="lion")

_fraction = functools.partial(option_field, minimum=0, below=1)
_moment = functools.partial(option_field, "fp32", choices=("fp32", "bf16"))
_of_muon = functools.partial(option_field, only_with=MUON)


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer. Biases and one-dimensional weights have no weight decay."""

    optimizer: str = option_field(
        "adam",
        "optimizer; adam is AdamW (decoupled weight decay); muon updates the matrices of the "
        "transformer layers and AdamW everything else",
        choices=("adam", "sgd", "lion", "muon"),
        synonyms={"dist_muon": "muon"},
    )
    lr: float = option_field(UNSET_FLOAT, "maximum learning rate", required=True, minimum=0)
    adam_beta1: float = _fraction(0.9, "decay rate of Adam's first moment", only_with=ADAM)
    adam_beta2: float = _fraction(0.999, "decay rate of Adam's second moment", only_with=ADAM)
    adam_eps: float = option_field(
        1e-8, "epsilon added to the denominator of Adam", minimum=0, only_with=ADAM
    )
    exp_avg_dtype: str = _moment(
        "type of first moments and momenta", only_with=when(optimizer=("adam", "muon", "lion"))
    )
    exp_avg_sq_dtype: str = _moment("type of second moments", only_with=ADAM)
    use_bnb_optimizer: bool = option_field(
        False,
        "keep Adam's moments in 8 bits, by bitsandbytes (an approximation)",
        only_with=when(optimizer="adam"),
    )
    lion_beta1: float = _fraction(0.9, "weight of Lion's momentum in its step", only_with=LION)
    lion_beta2: float = _fraction(0.99, "decay rate of Lion's momentum", only_with=LION)
    muon_momentum: float = _fraction(0.95, "decay rate of Muon's momentum", only_with=MUON)
    muon_nesterov: bool = _of_muon(
        True, "without Nesterov momentum in Muon", flag="muon-no-nesterov"
    )
    muon_num_ns_steps: int = _of_muon(5, "Newton-Schulz iterations of Muon", minimum=1, maximum=20)
    muon_scale_mode: str = _of_muon(
        "spectral",
        "factor of Muon's update of a matrix of r rows and c columns: spectral sqrt(max(r, c)), "
        "unit_rms_norm sqrt(r / c), shape_scaling sqrt(max(1, r / c))",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = _of_muon(
        0.2,
        "further factor of Muon's update; 0.2 with spectral makes its steps as large as AdamW's",
        above=0,
    )
    muon_coefficient_type: str = _of_muon(
        "simple",
        "coefficients of Muon's iterations: simple its author's, quintic Megatron's default, "
        "polar_express the best for each iteration",
        choices=("simple", "quintic", "polar_express"),
    )
    normuon: bool = _of_muon(
        False, "divide Muon's update of each neuron by the root of its second moment (NorMuon)"
    )
    normuon_beta2: float = _fraction(
        0.95,
        "decay rate of the second moments of neurons",
        only_with=(MUON, when(normuon=True)),
    )
    sgd_momentum: float = _fraction(0.9, "momentum of SGD", only_with=when(optimizer="sgd"))
    qk_clip: bool = option_field(
        False,
        "after a step, scale the weights of queries and keys of heads whose largest attention "
        "logit exceeds a threshold (MuonClip)",
    )
    qk_clip_threshold: float = option_field(
        100.0, "largest attention logit", above=0, only_with=when(qk_clip=True)
    )
    qk_clip_alpha: float = option_field(
        0.5,
        "part of the scaling that queries have, as an exponent; keys have the rest",
        minimum=0,
        maximum=1,
        only_with=when(qk_clip=True),
    )
    decoupled_lr: float | None = option_field(
        None,
        "maximum learning rate of the word embedding and the output layer, with the schedule of "
        "--lr (default: --lr)",
        minimum=0,
    )
    decoupled_min_lr: float | None = option_field(
        None,
        "their minimum learning rate after warmup (default: --min-lr)",
        minimum=0,
        only_with=when(decoupled_lr=ANY_VALUE),
    )
    weight_decay: float = option_field(0.01, "weight decay coefficient", minimum=0)
    cautious_weight_decay: bool = option_field(
        False,
        "decay only the elements of weights that the update moves towards zero",
        only_with=when(optimizer=("adam", "muon", "lion")),
    )
    embedding_weight_decay: float | None = option_field(
        None,
        "weight decay coefficient of the word and position embeddings, in proportion to the "
        "schedule of --weight-decay (default: --weight-decay)",
        minimum=0,
    )
    param_group: tuple[str, ...] | None = option_field(
        None,
        "learning rate and weight decay of the weights whose names match a pattern with * and ?: "
        "'pattern=layers.*.mlp.*,lr=1e-4,wd=0.05', or factors such as lr=0.1x; of several "
        "patterns the first that matches, see docs/training/zero.md",
        nargs="*",
        metavar="GROUP",
        repeatable=True,
    )
    start_weight_decay: float | None = option_field(
        None, "initial weight decay (default: --weight-decay)", minimum=0
    )
    end_weight_decay: float | None = option_field(
        None, "final weight decay (default: --weight-decay)", minimum=0
    )
    weight_decay_incr_style: str = option_field(
        "constant", "weight decay schedule", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = option_field(
        1.0, "maximum global norm of the gradient; 0 disables clipping", minimum=0
    )

    calculate_per_token_loss: bool = option_field(
        False,
        "average loss and gradients over all counted tokens of the global batch instead of over "
        "micro-batches",
    )

    skip_loss_spikes: float | None = option_field(
        None,
        "SIGMA: skip a step whose loss or gradient norm exceeds the mean of the last steps by more "
        "than SIGMA standard deviations",
        metavar="SIGMA",
        above=0,
    )
    skip_loss_spikes_window: int = option_field(
        128,
        "number of last steps for --skip-loss-spikes; no step is skipped before half of them",
        minimum=4,
        only_with=when(skip_loss_spikes=ANY_VALUE),
    )

    @property
    def has_8_bit_moments(self) -> bool:
        return self.optimizer == "adam" and self.use_bnb_optimizer

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
