"""Learning rate, weight decay and epsilon of each declared weight, as factors of the options.

Those of muP are, for the width, Megatron-LM's of `--use-mup` (table 8 of Yang et al. 2022), and for
the depth those of CompleteP (table 1 of Dey et al. 2025). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron_ds.config import ModelConfig, OptimizerConfig
from megatron_ds.config.problems import user_error
from megatron_ds.parallel.weights import Role, Weight


class Multipliers(NamedTuple):
    """Multipliers of the scheduled learning rate and weight decay for a parameter."""

    lr: float = 1.0
    weight_decay: float = 1.0
    is_matrix: bool = False
    """Whether the optimizer updates the parameter as a matrix."""
    is_decoupled: bool = False
    """Whether --decoupled-lr is its learning rate."""
    eps: float = 1.0
    """Factor of Adam's epsilon."""


MultiplierRule = Callable[[Weight], Multipliers]
"""Maps a parameter's declaration to its factors."""


def decay_matrices_only(weight: Weight) -> Multipliers:
    """The default rule, as in Megatron: no weight decay for biases and weights of norms."""
    decay = 0.0 if weight.role in (Role.VECTOR, Role.OUTPUT_BIAS) else 1.0
    return Multipliers(lr=weight.lr_scale, weight_decay=decay)


def multiplier_rule(options: OptimizerConfig, model: ModelConfig) -> MultiplierRule:
    """The rule for the options of a run."""
    decay = options.weight_decay
    embedding_decay = options.embedding_weight_decay
    # Without weight decay, embeddings have none, either.
    embeddings = 1.0 if embedding_decay is None or not decay else embedding_decay / decay
    named = options.param_groups

    def rule(weight: Weight) -> Multipliers:
        factors = decay_matrices_only(weight)
        role = weight.role
        if role in (Role.WORDS, Role.POSITIONS):
            factors = factors._replace(weight_decay=embeddings)
        factors = factors._replace(
            is_matrix=options.spec.matrices is not None and role is Role.MATRIX,
            is_decoupled=options.decoupled_lr is not None and role in (Role.WORDS, Role.OUTPUT),
        )
        if model.use_mup:
            factors = _transferred(weight, factors, model, options)
        group = next((group for group in named if group.matches(weight.name)), None)
        if group is not None and (lr := group.lr) is not None:
            factors = factors._replace(
                lr=lr.factor(factors.lr, options.lr),
                is_decoupled=factors.is_decoupled and lr.is_factor,
            )
        if group is not None and group.wd is not None:
            factors = factors._replace(weight_decay=group.wd.factor(factors.weight_decay, decay))
        return factors

    return rule


def _transferred(
    weight: Weight, factors: Multipliers, model: ModelConfig, options: OptimizerConfig
) -> Multipliers:
    """The factors of a weight with those of muP.

    Raises:
        UserError: If the weight does not declare which of its dimensions grow with the width.
    """
    if weight.width_mult is None:
        raise user_error("mup-undeclared-weight", name=weight.name)
    lr = _rate(weight, factors, model, options)
    return factors._replace(
        lr=factors.lr * lr,
        weight_decay=factors.weight_decay / (lr if model.mup_independent_weight_decay else 1.0),
        eps=_epsilon(weight, model, options),
    )


def _rate(
    weight: Weight, factors: Multipliers, model: ModelConfig, options: OptimizerConfig
) -> float:
    """The factor of the learning rate by the width."""
    assert weight.width_mult is not None
    spec = options.spec
    is_matrix = weight.role is Role.MATRIX
    if not spec.has_bounded_steps:  # its steps are proportional to the gradient
        return 1.0 if is_matrix or factors.is_decoupled else model.width_mult
    if spec.matrices is not None and spec.matrices.is_orthogonal and is_matrix:
        return 1.0
    return 1 / weight.width_mult


def _epsilon(weight: Weight, model: ModelConfig, options: OptimizerConfig) -> float:
    """The factor of Adam's epsilon, which follows the size of the gradients."""
    assert weight.width_mult is not None
    if model.has_depth_transfer and "adam_eps" in options.spec.options:
        is_in_layer = weight.role in (Role.MATRIX, Role.VECTOR)
        return 1 / (model.width_mult * (model.depth_mult if is_in_layer else 1.0))
    return 1 / weight.width_mult if options.spec.name == "adam" else 1.0
