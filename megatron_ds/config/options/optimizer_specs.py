"""Declarations of the optimizers: states, DeepSpeed block, names, and what each one excludes.

Optimizers are declared here, once. Their options are fields in `optimizer.py`; the class of the
type `megatron_ds.SOAP` is SOAP in `megatron_ds/engine/optimizers/soap.py`. Memory estimates, the
start-up banner, the settings that are read back from the engine, the axis and the rules of the
support matrix, the generated DeepSpeed configuration and the checks of checkpoints all read the
declarations. Does not import torch.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType

from megatron_ds.dataclass import dataclass

BLOCKWISE_8_BIT = 1 + 4 / 256
"""Bytes per element of an 8-bit moment, which has one scale in fp32 for 256 elements."""
MOMENT_TYPES = ("exp_avg_dtype", "exp_avg_sq_dtype")
"""Options with the types of moments."""
UNTESTED = (
    "nvme-with-other-optimizer",
    "bf16-masters-untested",
    "partial-offload-of-other-optimizer",
)
"""Problems of settings that are tested with Adam alone."""


class Computed(enum.Enum):
    """Values of a DeepSpeed block that no option has."""

    FUSED = enum.auto()
    """Whether torch's fused kernel is available on the device."""


Param = str | tuple[str, ...] | None | Computed
"""Source of a value: an option, several options of a list, null, or a computed value."""


@dataclass(frozen=True)
class State:
    """A state tensor of the optimizer, with an element for each element of a weight."""

    name: str
    """Key in the state of torch's optimizer."""
    dtype: str | None = None
    """Option with its type. None: fp32."""
    is_8_bit: bool = False
    """Whether its elements have 8 bits, with scales of blocks, instead."""
    only_with: str | None = None
    """Option without which, if it is 0, there is no such state."""


@dataclass(frozen=True)
class MatrixUpdate:
    """Update of the full matrices of transformer layers; AdamW updates all other weights."""

    states: tuple[State, ...]
    """States of a matrix, instead of the states of AdamW."""
    description: str
    """Text for the banner, in which options in braces are replaced by their values."""
    tensors: int = 0
    """Tensors of a matrix, in the type of the parameters, that a rank sends to its owner."""
    fp32_tensors: int = 0
    """Number of fp32 tensors of a matrix that a rank sends to its owner, or further memory of this
    size."""
    is_orthogonal: bool = False
    """Whether the steps are orthogonal matrices, whose learning rate muP does not scale."""


@dataclass(frozen=True)
class OptimizerSpec:
    """Declaration of an optimizer, or of a variant of one that a switch selects."""

    name: str
    """Value of --optimizer."""
    title: str
    """Name in the banner and in the settings of the engine: the name of the class."""
    type: str
    """`optimizer.type` of the DeepSpeed configuration. `megatron_ds.X` is the class X of the module
    `megatron_ds.engine.optimizers.x`."""
    params: Mapping[str, Param]
    """Keys of `optimizer.params` besides `lr` and `weight_decay`, in order. Options of the types of
    moments are left out if all moments are in fp32."""
    states: tuple[State, ...]
    """States of weights that are not updated as matrices."""
    matrices: MatrixUpdate | None = None
    """Update of full matrices. None: all weights are updated element by element."""
    saved_name: str = ""
    """Name by which checkpoints identify the states. Default: `name`."""
    switch: str = ""
    """Option that selects this variant of the optimizer `name`. Empty for the plain optimizer."""
    synonyms: tuple[str, ...] = ()
    """Other values of --optimizer that mean the same."""
    file_types: tuple[str, ...] = ()
    """Values of `optimizer.type` of a user's DeepSpeed file, in any case, that select it."""
    file_aliases: tuple[str, ...] = ()
    """Further values of this kind, in lower case, that messages do not list."""
    has_kernels: bool = False
    """Whether an `AdamKernel` is its implementation while all moments are in fp32."""
    has_bounded_steps: bool = True
    """Whether a step changes a weight by about the learning rate, whatever the gradient's size."""
    is_bound_to_layout: bool = False
    """Whether its states can be loaded in the layout that saved them only."""
    excludes: tuple[str, ...] = UNTESTED
    """Codes of the problems that it raises: of rules in layout_rules.toml whose values for the axis
    `optimizer` are "excluded", and of checks."""
    excluded_axes: tuple[str, ...] = ()
    """Axes of the support matrix on which it supports only the default value."""

    @property
    def checkpoint_name(self) -> str:
        """Name by which checkpoints identify the states."""
        return self.saved_name or self.name

    @property
    def options(self) -> frozenset[str]:
        """Options with the values of its DeepSpeed block."""
        options: set[str] = set()
        for param in self.params.values():
            options.update(param if isinstance(param, tuple) else ())
            options.update({param} if isinstance(param, str) else ())
        return frozenset(options)

    @property
    def betas(self) -> tuple[str, ...]:
        """Options with the decay rates of its averages; empty if it has none."""
        betas = self.params.get("betas")
        return betas if isinstance(betas, tuple) else ()

    def option_of(self, key: str) -> str | None:
        """The option with the value of a key of the optimizer's block; None if no option sets the
        key."""
        param = self.params.get(key)
        return param if isinstance(param, str) else None


_BETAS_AND_EPSILON: Mapping[str, Param] = {"betas": ("adam_beta1", "adam_beta2"), "eps": "adam_eps"}
_ADAMW: Mapping[str, Param] = {**_BETAS_AND_EPSILON, **{option: option for option in MOMENT_TYPES}}
_FIRST_MOMENT = State("exp_avg", "exp_avg_dtype")
_SECOND_MOMENT = State("exp_avg_sq", "exp_avg_sq_dtype")
_MOMENTUM = State("momentum_buffer", "exp_avg_dtype")

ADAM = OptimizerSpec(
    "adam",
    "AdamW",
    "megatron_ds.AdamW",
    params={**_ADAMW, "fused": Computed.FUSED},
    states=(_FIRST_MOMENT, _SECOND_MOMENT),
    file_types=("Adam", "AdamW"),
    file_aliases=("fusedadam", "apexfusedadam", "cpuadam", "deepspeedcpuadam"),
    has_kernels=True,
    excludes=(),
)
ADAM_8_BIT = dataclasses.replace(
    ADAM,
    title="AdamW8bit",
    type="bitsandbytes.AdamW8bit",
    params=_BETAS_AND_EPSILON,
    states=(State("exp_avg", is_8_bit=True), State("exp_avg_sq", is_8_bit=True)),
    saved_name="adam8bit",
    switch="use_bnb_optimizer",
    has_kernels=False,
    is_bound_to_layout=True,
    excluded_axes=("offload", "pp", "sp", "experts"),
)
ADAM_STOCHASTIC = dataclasses.replace(
    ADAM,
    title="StochasticAdamW",
    type="megatron_ds.StochasticAdamW",
    params=_BETAS_AND_EPSILON,
    states=(State("exp_avg"), State("exp_avg_sq")),
    switch="bf16_stochastic_round",
    has_kernels=False,
    excluded_axes=("offload", "experts"),
)
SGD = OptimizerSpec(
    "sgd",
    "SGD",
    "SGD",
    params={"momentum": "sgd_momentum"},
    states=(State("momentum_buffer", only_with="sgd_momentum"),),
    file_types=("SGD",),
    has_bounded_steps=False,
    excludes=("sgd-with-offload", *UNTESTED),
)
LION = OptimizerSpec(
    "lion",
    "Lion",
    "megatron_ds.Lion",
    params={"betas": ("lion_beta1", "lion_beta2"), "exp_avg_dtype": "exp_avg_dtype"},
    states=(_FIRST_MOMENT,),
    file_types=("Lion",),
    file_aliases=("fusedlion", "deepspeedcpulion", "megatron_ds.lion"),
)
MUON = OptimizerSpec(
    "muon",
    "Muon",
    "megatron_ds.Muon",
    params={
        **_ADAMW,
        "momentum": "muon_momentum",
        "nesterov": "muon_nesterov",
        "steps": "muon_num_ns_steps",
        "coefficient_type": "muon_coefficient_type",
        "scale_mode": "muon_scale_mode",
        "scale_factor": "muon_extra_scale_factor",
        "fused": Computed.FUSED,
        "neuron_beta": None,
    },
    states=ADAM.states,
    matrices=MatrixUpdate(
        (_MOMENTUM,), "{muon_coefficient_type} coefficients", tensors=1, is_orthogonal=True
    ),
    synonyms=("dist_muon",),
    file_types=("Muon",),
)
NORMUON = dataclasses.replace(
    MUON,
    params={**MUON.params, "neuron_beta": "normuon_beta2"},
    matrices=MatrixUpdate(
        (_MOMENTUM, _SECOND_MOMENT),
        "{muon_coefficient_type} coefficients, second moments of neurons",
        tensors=1,
        fp32_tensors=1,
        is_orthogonal=True,
    ),
    saved_name="normuon",
    switch="normuon",
)
SOAP = OptimizerSpec(
    "soap",
    "SOAP",
    "megatron_ds.SOAP",
    params={
        **_ADAMW,
        "shampoo_beta": "soap_shampoo_beta",
        "precondition_frequency": "soap_precondition_frequency",
        "fused": Computed.FUSED,
    },
    states=ADAM.states,
    matrices=MatrixUpdate(
        (_FIRST_MOMENT, _SECOND_MOMENT, State("preconditioner"), State("eigenbasis")),
        "eigenbases every {soap_precondition_frequency} steps, Shampoo beta {soap_shampoo_beta:g}",
        fp32_tensors=3,
    ),
)

SPECS = (ADAM, ADAM_8_BIT, ADAM_STOCHASTIC, SGD, LION, MUON, NORMUON, SOAP)
"""All optimizers, in the order of the choices of --optimizer; variants follow their optimizer."""
NAMES = tuple(dict.fromkeys(spec.name for spec in SPECS))
"""Values of --optimizer."""
SYNONYMS: Mapping[str, str] = MappingProxyType(
    {synonym: spec.name for spec in SPECS for synonym in spec.synonyms}
)
"""Other values of --optimizer -> the value with the same meaning."""


def with_options(*options: str) -> tuple[str, ...]:
    """Values of --optimizer whose DeepSpeed block has one of these options, by the first one."""
    names = (spec.name for option in options for spec in SPECS if option in spec.options)
    return tuple(dict.fromkeys(names))


def excluded_by(code: str) -> tuple[str, ...]:
    """Values of --optimizer that raise a problem."""
    return tuple(dict.fromkeys(spec.name for spec in SPECS if code in spec.excludes))


def is_bound_to_layout(checkpoint_name: str) -> bool:
    """Whether the states of a checkpoint can be loaded in the layout that saved them only."""
    return any(spec.is_bound_to_layout for spec in SPECS if spec.checkpoint_name == checkpoint_name)
