"""GPT pretraining: Megatron's parallelism trained by DeepSpeed's engines.

The names below are for Python programs and notebooks, see docs/use/notebook.md. Each is imported
when it is used: `import megatron_ds` imports neither torch nor another package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_ds.version import VERSION as __version__

if TYPE_CHECKING:
    from megatron_ds.api.language_model import LanguageModel
    from megatron_ds.api.loading import load
    from megatron_ds.api.planning import plan
    from megatron_ds.api.training import pretrain
    from megatron_ds.config.problems import UserError
    from megatron_ds.launch.exit_codes import RunAborted, SettingsRejected
    from megatron_ds.training.extensions import Callback, Extensions
    from megatron_ds.training.records import Logger
    from megatron_ds.training.run_record import RunRecord

__all__ = [
    "Callback",
    "Extensions",
    "LanguageModel",
    "Logger",
    "RunAborted",
    "RunRecord",
    "SettingsRejected",
    "UserError",
    "__version__",
    "load",
    "plan",
    "pretrain",
]

_MODULES = {
    "Callback": "training.extensions",
    "Extensions": "training.extensions",
    "LanguageModel": "api.language_model",
    "Logger": "training.records",
    "RunAborted": "launch.exit_codes",
    "RunRecord": "training.run_record",
    "SettingsRejected": "launch.exit_codes",
    "UserError": "config.problems",
    "load": "api.loading",
    "plan": "api.planning",
    "pretrain": "api.training",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__]
