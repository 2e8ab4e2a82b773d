"""Calls of a model's modules without the hooks of torch.nn.Module.

In the step of a small model, Python takes as long as the kernels. A tenth of the step is the search
for parameters, buffers and submodules, which torch.nn.Module keeps in dictionaries of their own;
the search for hooks is a twentieth.
"""

from __future__ import annotations

from torch import nn


def call_directly(model: nn.Module) -> None:
    """Makes calls of a model's modules calls of their `forward`, and lets Python find what they
    consist of.

    Results do not change. Assigning a parameter or a submodule still replaces it. Hooks that are
    registered later are not called, and a buffer that is assigned later is not found: this is for
    programs of which no other code gets the model. Modules that have hooks, or a call of their own,
    keep it.

    Args:
        model: A model on its device, which will not be trained.
    """
    classes = dict[type[nn.Module], type[nn.Module]]()
    for module in model.modules():
        vars(module).update({**module._parameters, **module._buffers, **module._modules})
        if _has_plain_call(module):
            cls = type(module)
            if cls not in classes:
                classes[cls] = _direct_class(cls)
            module.__class__ = classes[cls]


def _has_plain_call(module: nn.Module) -> bool:
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    is_compiled = getattr(module, "_compiled_call_impl", None) is not None
    is_replaced = type(module).__call__ is not nn.Module.__call__ or "forward" in vars(module)
    return not (any(hooks) or is_compiled or is_replaced)


def _direct_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class, whose instances are called without hooks."""
    names = {"__call__": cls.forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), names)
