"""Rotary parameters of a config.json, as the family's configuration class of transformers has them.

Versions before 5 of transformers have a key for each value and `rope_scaling`; later ones have all
of them in `rope_parameters`, which may have an object for each type of layers. The class moves
every value to `rope_parameters` (`convert_rope_params_to_dict` and `standardize_rope_params` of
transformers 5), and families differ in which value takes precedence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ds.conversion.huggingface.config_rows import FULL, WINDOWED

PARAMETERS = "rope_parameters"
SCALING = "rope_scaling"
ORIGINAL = "original_max_position_embeddings"
FRACTION = "partial_rotary_factor"
PLAIN = {"rope_type": "default"}
WITH_ORIGINAL = ("llama3", "yarn", "longrope")
"""Types of scaling that use the sequence length before."""


@dataclass(frozen=True)
class RopeKeys:
    """Where a family's configuration class finds its rotary parameters."""

    theta_key: str = "rope_theta"
    theta: Any = 10000.0
    """Default of the base."""
    fraction_key: str = FRACTION
    fraction: float | None = None
    """Default of the fraction of a head that is rotated. None: the family rotates everything."""
    window_theta: Sequence[Any] | None = None
    """Key and default of the base in layers with a window; an empty key: it is the default. None:
    the parameters are one object for all layers."""
    scaling: Mapping[str, Any] | None = None
    """Default of the parameters. None: no scaling."""

    @property
    def names(self) -> set[str]:
        """All keys next to `rope_parameters` that the class reads."""
        window = () if self.window_theta is None else self.window_theta[:1]
        return {self.theta_key, self.fraction_key, ORIGINAL, PARAMETERS, SCALING, *window}

    def parameters(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters by name or, with `window_theta`, by type of layers and name.

        Args:
            values: All values of the config.json.

        Raises:
            TypeError: If an object is another value.
            LookupError: If `rope_scaling` has no object that it could change.
        """
        if self.window_theta is not None:
            window_key, window_theta = self.window_theta
            return self._by_type(values, window_key, window_theta)
        stored = values.get(PARAMETERS)
        stored = (self.scaling or {}) if stored is None else stored
        parameters = {**_object(values.get(SCALING) or stored)}
        parameters.setdefault("rope_theta", values.get(self.theta_key, self.theta))
        fraction = values.get(self.fraction_key, self.fraction)
        if fraction is not None:
            parameters.setdefault(FRACTION, fraction)
        _set_type(parameters)
        if parameters["rope_type"] in WITH_ORIGINAL:
            parameters.setdefault(ORIGINAL, values.get("max_position_embeddings"))
            # A value next to the object takes precedence over the one in it.
            parameters[ORIGINAL] = values.get(ORIGINAL, parameters[ORIGINAL])
        return parameters

    def _by_type(
        self, values: Mapping[str, Any], window_key: str, window_theta: float
    ) -> dict[str, Any]:
        stored = values.get(PARAMETERS)
        parameters = {FULL: PLAIN, WINDOWED: PLAIN} if stored is None else {**_object(stored)}
        if (scaling := values.get(SCALING)) is not None:
            parameters[FULL] = {**_object(parameters[FULL]), **_object(scaling)}
        full, windowed = ({**_object(parameters.get(name) or {})} for name in (FULL, WINDOWED))
        full.setdefault("rope_theta", values.get(self.theta_key, self.theta))
        windowed.setdefault("rope_theta", values.get(window_key, window_theta))
        for layer_parameters in (full, windowed):
            _set_type(layer_parameters)
            if (fraction := values.get(self.fraction_key)) is not None:
                layer_parameters.setdefault(FRACTION, fraction)
            if layer_parameters["rope_type"] in WITH_ORIGINAL:
                layer_parameters.setdefault(ORIGINAL, values.get("max_position_embeddings"))
            # YaRN looks for this one next to the objects of the types.
            layer_parameters["truncate"] = parameters.get("truncate", True)
        return {FULL: full, WINDOWED: windowed}


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not an object")
    return value


def _set_type(parameters: dict[str, Any]) -> None:
    """Versions before 4.43 have `type`."""
    parameters.setdefault("rope_type", parameters.get("type", "default"))
