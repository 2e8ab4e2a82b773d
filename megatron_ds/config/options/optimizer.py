"""Options of the optimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from megatron_ds.config.fields import (
    ANY_VALUE,
    UNSET_FLOAT,
    Decides,
    InPhase,
    in_effect,
    option_field,
    when,
)
from megatron_ds.config.options.optimizer_specs import (
    ADAM,
    MOMENT_TYPES,
    NAMES,
    SPECS,
    SYNONYMS,
    OptimizerSpec,
    with_options,
)
from megatron_ds.config.param_group import ParamGroup, group_problems
from megatron_ds.config.problems import Problem
from megatron_ds.dataclass import dataclass

MATRIX_BATCH = 2**25
"""Most elements of matrices of one shape that are updated at once, or of a single one."""
ADAMW = when(optimizer=with_options("adam_eps"))
"""Optimizers that update all weights by AdamW, or the weights that are not matrices."""
AVERAGING = when(optimizer=with_options("adam_eps", "exp_avg_dtype"))
"""Optimizers with an average of gradients whose type is an option."""
MUON = when(optimizer="muon")
SOAP = when(optimizer="soap")
LION = when(optimizer="lion")

_fraction = functools.partial(option_field, minimum=0, below=1)
_moment = functools.partial(option_field, "fp32", choices=("fp32", "bf16"))
_of_muon = functools.partial(option_field, only_with=MUON)


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer. Biases and one-dimensional weights have no weight decay."""

    DECIDES = Decides.TRAINING

    optimizer: str = option_field(ADAM.name, choices=NAMES, synonyms=SYNONYMS)
    """optimizer; adam is AdamW (decoupled weight decay); muon and soap update the matrices of the
    transformer layers and AdamW everything else."""
    lr: float = option_field(
        UNSET_FLOAT,
        required=True,
        minimum=0,
        common=True,
        decides=Decides.SCHEDULE,
        in_phase=InPhase.REPLACED,
    )
    """Maximum learning rate."""
    adam_beta1: float = _fraction(0.9, only_with=ADAMW)
    """Decay rate of Adam's first moment."""
    adam_beta2: float = _fraction(0.999, only_with=ADAMW)
    """Decay rate of Adam's second moment."""
    adam_eps: float = option_field(1e-8, minimum=0, only_with=ADAMW)
    """Epsilon added to the denominator of Adam."""
    exp_avg_dtype: str = _moment(only_with=AVERAGING)
    """Type of first moments and momenta."""
    exp_avg_sq_dtype: str = _moment(only_with=ADAMW)
    """Type of second moments."""
    use_bnb_optimizer: bool = option_field(False, only_with=when(optimizer="adam"))
    """Keep Adam's moments in 8 bits, by bitsandbytes (an approximation)."""
    bf16_stochastic_round: bool = option_field(False, only_with=when(optimizer="adam"))
    """Round weights and second moments in bf16 stochastically, so that small updates are kept in
    the mean; with --bf16-master-weights."""
    lion_beta1: float = _fraction(0.9, only_with=LION)
    """Weight of Lion's momentum in its step."""
    lion_beta2: float = _fraction(0.99, only_with=LION)
    """Decay rate of Lion's momentum."""
    muon_momentum: float = _fraction(0.95, only_with=MUON)
    """Decay rate of Muon's momentum."""
    muon_nesterov: bool = _of_muon(True, flag="muon-no-nesterov")
    """`--muon-no-nesterov`: without Nesterov momentum in Muon."""
    muon_num_ns_steps: int = _of_muon(5, minimum=1, maximum=20)
    """Newton-Schulz iterations of Muon."""
    muon_scale_mode: str = _of_muon(
        "spectral", choices=("spectral", "unit_rms_norm", "shape_scaling")
    )
    """Factor of Muon's update of a matrix of r rows and c columns: spectral sqrt(max(r, c)),
    unit_rms_norm sqrt(r / c), shape_scaling sqrt(max(1, r / c))."""
    muon_extra_scale_factor: float = _of_muon(0.2, above=0)
    """Further factor of Muon's update; 0.2 with spectral makes its steps as large as AdamW's."""
    muon_coefficient_type: str = _of_muon("simple", choices=("simple", "quintic", "polar_express"))
    """Coefficients of Muon's iterations: simple its author's, quintic Megatron's default,
    polar_express the best for each iteration."""
    normuon: bool = _of_muon(False)
    """Divide Muon's update of each neuron by the root of its second moment (NorMuon)."""
    normuon_beta2: float = _fraction(0.95, only_with=(MUON, when(normuon=True)))
    """Decay rate of the second moments of neurons."""
    soap_shampoo_beta: float = _fraction(0.95, only_with=SOAP)
    """Decay rate of SOAP's preconditioner."""
    soap_precondition_frequency: int = option_field(10, minimum=1, only_with=SOAP)
    """Steps from one eigenbasis of SOAP's preconditioner to the next."""
    sgd_momentum: float = _fraction(0.9, only_with=when(optimizer="sgd"))
    """Momentum of SGD."""
    qk_clip: bool = option_field(False)
    """After a step, scale the weights of queries and keys of heads whose largest attention logit
    exceeds a threshold (MuonClip)."""
    qk_clip_threshold: float = option_field(100.0, above=0, only_with=when(qk_clip=True))
    """Largest attention logit."""
    qk_clip_alpha: float = option_field(0.5, minimum=0, maximum=1, only_with=when(qk_clip=True))
    """Part of the scaling that queries have, as an exponent; keys have the rest."""
    decoupled_lr: float | None = option_field(None, minimum=0, decides=Decides.SCHEDULE)
    """Maximum learning rate of the word embedding and the output layer, with the schedule of --lr
    (default: --lr)."""
    decoupled_min_lr: float | None = option_field(
        None, minimum=0, only_with=when(decoupled_lr=ANY_VALUE), decides=Decides.SCHEDULE
    )
    """Their minimum learning rate after warmup (default: --min-lr)."""
    weight_decay: float = option_field(
        0.01, minimum=0, decides=Decides.SCHEDULE, in_phase=InPhase.REPLACED
    )
    """Weight decay coefficient."""
    cautious_weight_decay: bool = option_field(False, only_with=AVERAGING)
    """Decay only the elements of weights that the update moves towards zero."""
    embedding_weight_decay: float | None = option_field(None, minimum=0)
    """Weight decay coefficient of the word and position embeddings, in proportion to the schedule
    of --weight-decay (default: --weight-decay)."""
    param_group: tuple[str, ...] | None = option_field(
        None, nargs="*", metavar="GROUP", repeatable=True
    )
    """Learning rate and weight decay of the weights whose names match a pattern with * and ?:
    'pattern=layers.*.mlp.*,lr=1e-4,wd=0.05', or factors such as lr=0.1x; of several patterns the
    first that matches, see docs/training/zero.md."""
    start_weight_decay: float | None = option_field(
        None, minimum=0, decides=Decides.SCHEDULE, in_phase=InPhase.REPLACED
    )
    """Initial weight decay (default: --weight-decay)."""
    end_weight_decay: float | None = option_field(
        None, minimum=0, decides=Decides.SCHEDULE, in_phase=InPhase.REPLACED
    )
    """Final weight decay (default: --weight-decay)."""
    weight_decay_incr_style: str = option_field(
        "constant",
        choices=("constant", "linear", "cosine"),
        decides=Decides.SCHEDULE,
        in_phase=InPhase.REPLACED,
    )
    """Weight decay schedule."""
    clip_grad: float = option_field(1.0, minimum=0)
    """Maximum global norm of the gradient; 0 disables clipping."""

    calculate_per_token_loss: bool = option_field(False)
    """Average loss and gradients over all counted tokens of the global batch instead of over
    micro-batches."""

    skip_loss_spikes: float | None = option_field(None, metavar="SIGMA", above=0)
    """SIGMA: skip a step whose loss or gradient norm exceeds the mean of the last steps by more
    than SIGMA standard deviations."""
    skip_loss_spikes_window: int = option_field(
        128, minimum=4, only_with=when(skip_loss_spikes=ANY_VALUE)
    )
    """Number of last steps for --skip-loss-spikes; no step is skipped before half of them."""

    @property
    def spec(self) -> OptimizerSpec:
        """Declaration of the optimizer, or of its variant. Adam's if `optimizer` is not valid."""
        variants = [spec for spec in SPECS if spec.name == self.optimizer] or [ADAM]
        chosen = (spec for spec in variants if spec.switch and getattr(self, spec.switch))
        return next(chosen, variants[0])

    @property
    def moment_dtypes(self) -> dict[str, str]:
        """The options of the types of moments, by name, unless all are fp32."""
        options = in_effect(self)
        types = {name: getattr(options, name) for name in MOMENT_TYPES}
        return {} if set(types.values()) == {"fp32"} else types

    @property
    def derived_values(self) -> dict[str, Any]:
        """The bounds of the weight decay schedule, which are --weight-decay if it is constant."""
        is_constant = self.weight_decay_incr_style == "constant"
        names = ("start", "end")
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
        if self.spec.has_bounded_steps and self.lr > 1:
            yield Problem("learning-rate-above-one", settings=self)

    def problems(self) -> Iterator[Problem]:
        """Check that a scheduled weight decay has a start and an end, and an embedding's a base."""
        rates = {"lr": self.lr, "weight_decay": self.weight_decay}
        for text, reason in group_problems(self.param_group or (), **rates):
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
