"""The types of the results of torch's operators, by the types of their inputs on one axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from spmd_types import P, R, V
from torch import Tensor

from tests.typed.lattice import (
    LINEAR,
    MULTILINEAR,
    NONLINEAR,
    PARTIAL,
    REPLICATED,
    ZERO,
    Dim,
    MismatchError,
    Type,
    combine,
    moved,
    varying,
)


@dataclass
class Call:
    """A call of an operator, seen on one axis."""

    name: str
    args: tuple[Any, ...]
    """With the defaults of those that are not passed."""
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    type_of: Callable[[Tensor], Type]
    is_data: bool = False
    """Whether the ranks of the axis have other samples."""
    is_local: bool = False
    """Whether a function may be of this rank's part of a sharded dimension only."""

    def types(self, tensors: Sequence[Any] | None = None) -> list[Type]:
        chosen = self.inputs if tensors is None else tensors
        return [self.type_of(each) for each in chosen if isinstance(each, Tensor)]


Rule = Callable[[Call], "Type | list[Type]"]


def dim_of(call: Call, tensors: Sequence[Tensor], shape: Sequence[int]) -> int | None:
    """The dimension of an elementwise result that varies, if all inputs agree."""
    dims: list[int | None] = []
    for tensor in tensors:
        kind, dim = call.type_of(tensor)
        if kind is V:
            dims.append(None if dim is None else moved(dim, dim - tensor.dim() + len(shape)))
    return agreed(dims)


def agreed(dims: Iterable[int | None]) -> int | None:
    """The only dimension of several that are known, the one of which more is known."""
    known = [dim for dim in dims if dim is not None]
    if not known or any(dim != known[0] for dim in known):
        return None
    return next((dim for dim in known if isinstance(dim, Dim)), known[0])


def elementwise(call: Call, linearity: Any, tensors: Sequence[Any], scalar: Any = None) -> Type:
    """The type of a result whose dimensions are those of its inputs, broadcast."""
    present = [each for each in tensors if isinstance(each, Tensor)]
    is_number = isinstance(scalar, int | float) and scalar != 0
    kind = combine(call.types(present), linearity, has_scalar=is_number)
    if kind is not V:
        return Type(kind)
    shape = call.outputs[0].shape
    return varying(dim_of(call, present, shape))


def unknown(call: Call) -> Type | list[Type]:
    """Elementwise where the shapes are those of elementwise functions; nonlinear."""
    kind = combine(call.types(), NONLINEAR)
    if kind is not V:
        return Type(kind)
    try:
        shape = torch.broadcast_shapes(*(each.shape for each in call.inputs))
    except RuntimeError:
        shape = None
    return [
        varying(dim_of(call, call.inputs, shape) if shape and each.dim() == len(shape) else None)
        for each in call.outputs
    ]


def constant(call: Call) -> Type:
    return REPLICATED


def zeros(call: Call) -> Type:
    return ZERO


def add(call: Call) -> Type:
    a, b = call.args[:2]
    return elementwise(call, LINEAR, (a, b), next((e for e in (a, b) if _is_number(e)), None))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def multiply(call: Call) -> Type:
    a, b = call.args[:2]
    if call.is_data and isinstance(a, Tensor) and isinstance(b, Tensor):
        for one, other in ((a, b), (b, a)):
            if call.type_of(one).kind is P and call.type_of(other).kind is V:
                # Each rank's summand has a factor of its own.
                return PARTIAL if other.dim() == 0 else varying()
    return elementwise(call, MULTILINEAR, call.args[:2])


def divide(call: Call) -> Type:
    a, b = call.args[:2]
    if isinstance(b, Tensor):
        combine(call.types([b]), NONLINEAR)
    return elementwise(call, MULTILINEAR, (a, b))


def linear(call: Call) -> Type:
    return elementwise(call, LINEAR, call.inputs)


def fill(call: Call) -> Type:
    value = call.args[1]
    if isinstance(value, Tensor):
        return call.type_of(value)
    return ZERO if value == 0 else REPLICATED


def masked_fill(call: Call) -> Type:
    x, mask, value = call.args[:3]
    combine(call.types([mask]), NONLINEAR)
    tensors = [x, mask] if call.type_of(x).kind is not P else [x]
    if call.type_of(x).kind is P and call.type_of(mask).kind is V:
        raise MismatchError("a partial sum is masked by what differs between the ranks")
    if isinstance(value, Tensor) and value.dim() == 0:
        value = float(value)
    return elementwise(call, LINEAR, tensors, value)


def where(call: Call) -> Type:
    mask, a, b = call.args[:3]
    kind = combine(call.types([a, b]), LINEAR)
    if kind is P and call.type_of(mask).kind is not V:
        return PARTIAL
    return elementwise(call, NONLINEAR, (mask, a, b))


def with_gradient(call: Call) -> Type:
    """Linear in the first input, a gradient, which is multiplied by a function of the others."""
    combine(call.types(call.inputs[1:]), NONLINEAR)
    return elementwise(call, MULTILINEAR, call.inputs)


# Views and copies: one input, whose dimensions are others.


def _moved(find: Callable[[Call, int], int | None]) -> Rule:
    def rule(call: Call) -> Type:
        kind, dim = call.type_of(call.inputs[0])
        to = None if dim is None else find(call, dim)
        is_moved = to is not None and not isinstance(to, Dim) and find is not _view
        return Type(kind, moved(dim, to) if is_moved else to)  # type: ignore[arg-type]

    return rule


def _positive(dim: int, ndim: int) -> int:
    return dim % ndim if ndim else 0


def view_dim(old: Sequence[int], new: Sequence[int], dim: int) -> int | None:
    """Where a dimension is after a view with another shape."""
    if 0 in old or math.prod(old) != math.prod(new):
        return None
    i = 0
    j = 0
    while i < len(old):
        first = i
        start = j
        a = old[i]
        b = 1
        i += 1
        while a != b or (j < len(new) and new[j] == 1 and i == len(old)):
            if b < a or i == len(old):
                b *= new[j]
                j += 1
            else:
                a *= old[i]
                i += 1
        if first <= dim < i:
            inner = math.prod(old[dim + 1 : i]) * getattr(dim, "inner", 1)
            is_inner = hasattr(dim, "inner") or math.prod(old[first:dim]) > 1
            if j - start == 1:
                return moved(dim, start, inner) if is_inner or dim < i - 1 else start
            if is_inner:
                ends = [k for k in range(start, j) if math.prod(new[k + 1 : j]) == inner]
                return ends[0] if ends else None
            if i - first == 1:
                sizes = [k for k in range(start, j) if new[k] > 1]
                return sizes[0] if sizes else (start if start < j else None)
            if math.prod(old[first:dim]) == 1:
                return start
            for k in range(start, j):
                if math.prod(new[start:k]) == math.prod(old[first:dim]):
                    return k
            return None
    return None


def _view(call: Call, dim: int) -> int | None:
    return view_dim(call.inputs[0].shape, call.outputs[0].shape, dim)


def _transpose(call: Call, dim: int) -> int:
    ndim = call.inputs[0].dim()
    if call.name == "t":
        return ndim - 1 - dim
    a, b = (_positive(each, ndim) for each in call.args[1:3])
    return {a: b, b: a}.get(dim, dim)


def _permute(call: Call, dim: int) -> int:
    return [_positive(each, call.inputs[0].dim()) for each in call.args[1]].index(dim)


def _unsqueeze(call: Call, dim: int) -> int:
    return dim + (_positive(call.args[1], call.inputs[0].dim() + 1) <= dim)


def _squeeze(call: Call, dim: int) -> int | None:
    return view_dim(call.inputs[0].shape, call.outputs[0].shape, dim)


def _expand(call: Call, dim: int) -> int:
    return dim - call.inputs[0].dim() + call.outputs[0].dim()


def _same(call: Call, dim: int) -> int:
    return dim


def _slice(call: Call, dim: int) -> int | None:
    """A part of merged dimensions is no part of the sharded one."""
    at = {"slice": 1, "split": 2, "split_with_sizes": 2}[call.name]
    is_cut = call.inputs[0].shape[dim] != call.outputs[0].shape[dim]
    is_merged = isinstance(dim, Dim) and dim == _positive(call.args[at], call.inputs[0].dim())
    return None if is_merged and is_cut else dim


def _select(call: Call, dim: int) -> int | None:
    removed = _positive(call.args[1], call.inputs[0].dim())
    return None if dim == removed else dim - (removed < dim)


def _select_backward(call: Call, dim: int) -> int:
    return dim + (_positive(call.args[2], len(call.args[1])) <= dim)


def concatenate(call: Call) -> Type:
    tensors = [each for each in call.args[0] if each.numel()] or list(call.args[0])
    return elementwise(call, LINEAR, tensors)


def stack(call: Call) -> Type:
    kind = combine(call.types(), LINEAR)
    dim = agreed(each.dim for each in call.types() if each.kind is V)
    inserted = _positive(call.args[1], call.outputs[0].dim())
    return Type(kind, None if kind is not V or dim is None else moved(dim, dim + (inserted <= dim)))


# Reductions.


def reduced(call: Call, dims: Sequence[int] | None, *, is_sum: bool) -> Type:
    """Over some dimensions, or all."""
    kind, dim = call.type_of(call.inputs[0])
    ndim = call.inputs[0].dim()
    combine([Type(kind)], LINEAR if is_sum else NONLINEAR)
    if kind is not V or dim is None:
        return Type(kind)
    over = {_positive(each, ndim) for each in dims} if dims else set(range(ndim))
    if dim in over:
        if is_sum:
            return PARTIAL
        if not call.is_local and call.inputs[0].is_floating_point():
            raise MismatchError(f"{call.name} of this rank's part of a sharded dimension")
        return varying()
    if call.outputs[0].dim() == ndim:
        return varying(dim)
    return varying(moved(dim, dim - sum(each < dim for each in over)))


def total(call: Call) -> Type:
    dims = call.args[1] if len(call.args) > 1 and isinstance(call.args[1], list | tuple) else None
    return reduced(call, dims, is_sum=True)


def reduction(call: Call) -> Type | list[Type]:
    dims = call.args[1] if len(call.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    return reduced(call, dims if isinstance(dims, list | tuple) else None, is_sum=False)


def along_last(call: Call) -> Type | list[Type]:
    """Softmax, sorts and the like: the shape stays, a dimension is needed as a whole."""
    dims = [each for each in call.args[1:] if type(each) is int] or [-1]
    if call.name == "topk":
        dims = dims[1:] or [-1]
    type_ = reduced(call, dims[:1], is_sum=False)
    if call.inputs[0].shape == call.outputs[0].shape:
        type_ = Type(type_.kind, call.type_of(call.inputs[0]).dim)
    return [type_ for _ in call.outputs]


def softmax_gradient(call: Call) -> Type:
    return with_gradient(call)


def sort(call: Call) -> list[Type]:
    """Sorting the rows of this rank is what it looks like."""
    combine(call.types(), NONLINEAR)
    return [call.type_of(call.inputs[0])] * len(call.outputs)


# Products.


def _product(call: Call, a: Tensor, b: Tensor, a_dims: str, b_dims: str, out_dims: str) -> Type:
    """The type of a product in Einstein's notation."""
    one = call.type_of(a)
    other = call.type_of(b)
    kind = combine([one, other], MULTILINEAR)
    if kind is not V:
        return Type(kind)
    labels = {
        None if each.dim is None else dims[each.dim]
        for each, dims in ((one, a_dims), (other, b_dims))
        if each.kind is V
    }
    if len(labels) > 1 or None in labels:
        return varying()
    (label,) = labels
    if label in out_dims:
        sharded = one if one.kind is V else other
        return varying(moved(sharded.dim, out_dims.index(label)))  # type: ignore[arg-type]
    return PARTIAL  # a sum over this rank's part of the dimension


NOTATIONS = {
    "mm": "ik,kj->ij",
    "bmm": "bik,bkj->bij",
    "mv": "ik,k->i",
    "dot": "k,k->",
    "addmm": "ik,kj->ij",
    "baddbmm": "bik,bkj->bij",
    "linear": "...",
}


def product(call: Call) -> Type:
    dims, out = NOTATIONS[call.name].split("->")
    a_dims, b_dims = dims.split(",")
    is_added = call.name in ("addmm", "baddbmm")
    a, b = call.args[1:3] if is_added else call.args[:2]
    type_ = _product(call, a, b, a_dims, b_dims, out)
    if not is_added:
        return type_
    kind = combine([type_, call.type_of(call.args[0])], LINEAR)
    return type_ if kind is type_.kind else Type(kind)


def grouped_product(call: Call) -> Type:
    a, b = call.args[:2]
    combine(call.types([each for each in call.args[2:] if isinstance(each, Tensor)]), NONLINEAR)
    if b.dim() == 3:
        return _product(call, a, b, "rk", "ekj", "rj")
    type_ = _product(call, a, b, "ir", "rj", "ij")
    return Type(type_.kind, None if type_.dim is None else type_.dim + 1)


# Layers.


def embedding(call: Call) -> Type:
    table = call.type_of(call.args[0])
    ids = call.type_of(call.args[1])
    if table.kind is V and table.dim == 0:
        if ids.kind is V:
            raise MismatchError("ids that differ are looked up in a table whose rows are sharded")
        return PARTIAL  # of the rows elsewhere there are zeros
    combine([ids], NONLINEAR)
    kind = combine([table, ids], MULTILINEAR)
    if kind is not V:
        return Type(kind)
    return ids if ids.kind is V else varying(call.outputs[0].dim() - 1)


def embedding_gradient(call: Call) -> Type:
    gradient = call.type_of(call.args[0])
    ids = call.type_of(call.args[1])
    kind = combine([gradient, ids], MULTILINEAR)
    if kind is not V:
        return Type(kind)
    dims = {each.dim for each in (gradient, ids) if each.kind is V}
    if None in dims or len(dims) > 1:
        return varying()
    return PARTIAL if dims.pop() < call.args[1].dim() else varying(1)


def norm(call: Call) -> list[Type]:
    x = call.inputs[0]
    shape = call.args[1]
    kind, dim = call.type_of(x)
    if kind is V and dim is not None and dim >= x.dim() - len(shape):
        raise MismatchError("a norm over a sharded dimension")
    type_ = elementwise(call, NONLINEAR, call.inputs)
    return [type_ for _ in call.outputs]


def norm_gradient(call: Call) -> list[Type]:
    x = call.args[1]
    combine(call.types(call.inputs[1:]), NONLINEAR)
    type_ = elementwise(call, MULTILINEAR, call.inputs)
    of_weights = type_
    if type_.kind is V and type_.dim is not None:
        leading = x.dim() - len(call.args[2])
        of_weights = PARTIAL if type_.dim < leading else varying(type_.dim - leading)
    return [type_, *[of_weights] * (len(call.outputs) - 1)]


def attention(call: Call) -> list[Type]:
    q = call.inputs[0]
    kind = combine(call.types(), NONLINEAR)
    dim = dim_of(call, call.inputs, q.shape) if kind is V else None
    if dim is not None and dim > 1:
        raise MismatchError("attention over a sharded sequence")
    return [Type(kind, dim) for _ in call.outputs]


def attention_gradient(call: Call) -> list[Type]:
    combine(call.types(call.inputs[1:]), NONLINEAR)
    kind = combine(call.types(), MULTILINEAR)
    dim = dim_of(call, call.inputs[:4], call.inputs[0].shape) if kind is V else None
    return [Type(kind, dim) for _ in call.outputs]


# Indices.


def index(call: Call) -> Type:
    x, places = call.args[:2]
    chosen = [(at, each) for at, each in enumerate(places) if isinstance(each, Tensor)]
    types = call.types([each for _, each in chosen])
    combine(types, NONLINEAR)
    kind, dim = call.type_of(x)
    if kind is P:
        combine([PARTIAL, *types], MULTILINEAR)
        return PARTIAL
    if combine([Type(kind), *types], NONLINEAR) is not V:
        return Type(combine([Type(kind), *types], NONLINEAR))
    at, _ = chosen[0]
    ndim = max(each.dim() for _, each in chosen)
    found: list[int | None] = [
        None if type_.dim is None else moved(type_.dim, at + ndim - each.dim() + type_.dim)
        for (_, each), type_ in zip(chosen, types, strict=True)
        if type_.kind is V
    ]
    if kind is V and dim is not None:
        behind = dim - sum(place < dim for place, _ in chosen) + ndim
        is_index = dim in [place for place, _ in chosen]
        found.append((at if dim == at else None) if is_index else dim if dim < at else behind)
    elif kind is V:
        found.append(None)
    return varying(None if None in found else agreed(found))


def index_select(call: Call) -> Type:
    """An index of one dimension."""
    x, dim, places = call.args[:3]
    indices = [None] * _positive(dim, x.dim()) + [places]
    return index(replace(call, args=(x, indices)))


def gather(call: Call) -> Type:
    x, _, places = call.args[:3]
    combine(call.types([places]), NONLINEAR)
    return elementwise(call, MULTILINEAR, [x, places])


def scatter(call: Call) -> Type:
    tensors = [each for each in call.args if isinstance(each, Tensor)]
    values = [each for each in (tensors[0], tensors[-1]) if each.is_floating_point()]
    combine(call.types([each for each in tensors if not each.is_floating_point()]), NONLINEAR)
    kind = combine(call.types(tensors), MULTILINEAR if values else NONLINEAR)
    kinds = call.types(tensors)
    present = [each for each in kinds if each.kind is not None]
    kind = V if any(each.kind is V for each in present) else R
    if any(each.kind is P for each in present):
        kind = combine([each for each in present if each.kind is not R], LINEAR)
    return Type(kind, kinds[0].dim if kind is V else None)


def slice_gradient(call: Call) -> Type:
    """Of a slice that each rank takes elsewhere of what all have, each has a summand."""
    gradient = call.type_of(call.inputs[0])
    if gradient.kind is V and gradient.dim == _positive(call.args[2], len(call.args[1])):
        node = torch._C._current_autograd_node()
        source = None if node is None else getattr(node.next_functions[0][0], "variable", None)
        if source is not None and call.type_of(source).kind is R:
            return PARTIAL
    return gradient


def dropped(call: Call) -> list[Type]:
    type_ = elementwise(call, MULTILINEAR, call.inputs)
    return [type_] * len(call.outputs)


def copied(call: Call) -> Type:
    source = call.args[1]
    kind, dim = call.type_of(source)
    return Type(kind, None if dim is None else moved(dim, dim + call.args[0].dim() - source.dim()))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "rsub"), add),
    **dict.fromkeys(("mul", "ger", "outer"), multiply),
    "div": divide,
    **dict.fromkeys(("neg", "masked_scatter", "cumsum"), linear),
    **dict.fromkeys(
        (
            "zeros",
            "new_zeros",
            "zeros_like",
            "zero",
            "empty",
            "new_empty",
            "empty_like",
            "empty_strided",
            "new_empty_strided",
        ),
        zeros,
    ),
    **dict.fromkeys(
        (
            "ones",
            "ones_like",
            "new_ones",
            "full_like",
            "new_full",
            "full",
            "arange",
            "randn",
            "rand",
            "bernoulli",
            "uniform",
            "normal",
            "random",
            "scalar_tensor",
        ),
        constant,
    ),
    "fill": fill,
    "masked_fill": masked_fill,
    "where": where,
    "copy": copied,
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _moved(_view)),
    **dict.fromkeys(("transpose", "t"), _moved(_transpose)),
    "permute": _moved(_permute),
    "unsqueeze": _moved(_unsqueeze),
    "squeeze": _moved(_squeeze),
    "expand": _moved(_expand),
    **dict.fromkeys(
        (
            "clone",
            "detach",
            "alias",
            "_to_copy",
            "constant_pad_nd",
            "flip",
            "repeat",
            "view_as",
            "lift_fresh",
            "contiguous",
            "tril",
            "triu",
        ),
        _moved(_same),
    ),
    **dict.fromkeys(("slice", "split", "split_with_sizes"), _moved(_slice)),
    **dict.fromkeys(("select", "unbind"), _moved(_select)),
    "slice_backward": slice_gradient,
    "select_backward": _moved(_select_backward),
    "cat": concatenate,
    "stack": stack,
    **dict.fromkeys(("sum", "mean"), total),
    **dict.fromkeys(
        (
            "amax",
            "amin",
            "max",
            "min",
            "logsumexp",
            "argmax",
            "aminmax",
            "linalg_vector_norm",
            "var_mean",
            "all",
            "any",
        ),
        reduction,
    ),
    **dict.fromkeys(("_softmax", "_log_softmax", "topk"), along_last),
    **dict.fromkeys(("sort", "argsort"), sort),
    **dict.fromkeys(NOTATIONS, product),
    "_grouped_mm": grouped_product,
    "embedding": embedding,
    "embedding_dense_backward": embedding_gradient,
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), norm),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), norm_gradient),
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_gradient,
    **dict.fromkeys(
        (
            "gelu_backward",
            "silu_backward",
            "tanh_backward",
            "sigmoid_backward",
            "_softmax_backward_data",
            "threshold_backward",
            "native_dropout_backward",
        ),
        with_gradient,
    ),
    "native_dropout": dropped,
    "index": index,
    "index_select": index_select,
    "gather": gather,
    **dict.fromkeys(
        (
            "scatter_add",
            "scatter",
            "index_put",
            "index_add",
            "_unsafe_index_put",
            "_index_put_impl",
        ),
        scatter,
    ),
}
"""By the name of the operator, without the underscore of those that write to their input."""


def result_types(call: Call) -> list[Type]:
    """The types of all outputs.

    Raises:
        MismatchError: Types meet that must not.
    """
    found = RULES.get(call.name, unknown)(call)
    return found if isinstance(found, list) else [found] * len(call.outputs)
