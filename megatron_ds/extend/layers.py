"""The public names of an own layer; importing them imports torch."""

from megatron_ds.model.attention.self_attention import KeyValueCache
from megatron_ds.model.block import Block
from megatron_ds.model.declaration.parts import NormSpec
from megatron_ds.model.declaration.residual import Residual
from megatron_ds.model.layers import LayerBuilder
from megatron_ds.model.mlp import MLP
from megatron_ds.model.norm import build_norm
from megatron_ds.model.position_embedding import AttentionContext
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sharding import StatefulModule, declared_parameter
from megatron_ds.parallel.weights import Partial, Role, ShardSpec, Weight, linear_weights

__all__ = [
    "MLP",
    "AttentionContext",
    "Block",
    "ColumnParallelLinear",
    "Group",
    "Initializer",
    "KeyValueCache",
    "LayerBuilder",
    "NormSpec",
    "Partial",
    "Residual",
    "Role",
    "RowParallelLinear",
    "ShardSpec",
    "StatefulModule",
    "Weight",
    "build_norm",
    "declared_parameter",
    "linear_weights",
]
