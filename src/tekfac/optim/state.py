"""Optimizer state in torch's own format, and back.

    {"state": {0: {"step": 7, "momentum_buffer": ..., "curvature": {...}}, 1: {...}},
     "param_groups": [{"lr": ..., "params": [0, 1], "param_names": ["0.weight", "0.bias"], "tekfac": {...}}]}

So frameworks and `torch.distributed.checkpoint` treat it like any other: state per parameter, by index, with
the names beside. The curvature of a layer is found under its weight. What belongs to the optimizer as a whole
(its method, clocks and random numbers, and the sizes of its layers) stands in the first group, under "tekfac":
entries beside "state" and "param_groups" would not survive those tools.

All of it is plain: dicts, lists, numbers, strings and tensors, which torch.load(weights_only=True) reads.
Nothing is cast: a factor comes back in the precision it was saved in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tekfac.curvature.averages import Average
from tekfac.curvature.eigenbasis import Eigenbasis
from tekfac.curvature.factors import KroneckerFactors
from tekfac.curvature.layer_curvature import LayerCurvature
from tekfac.curvature.motion import LayerMotion, Moving
from tekfac.damping import from_plain, to_plain
from tekfac.layers.layer import Layer
from tekfac.optim.sound_state import (
    require_entries,
    require_frame,
    require_group,
    require_layer,
    require_parameter,
)
from tekfac.ranks.shards import cut_like

FORMAT = 4
"""Raised when a state of the version before can no longer be read."""

OF_LAYERS = ("curvature", "motion")
"""Entries of a weight that are its whole layer's."""

AVERAGES = ("exp_avg", "exp_avg_sq")
"""Entries of a parameter without a block."""

KEY = "tekfac"
"""The entry of the first group with what belongs to the optimizer as a whole."""

Groups = Sequence[Mapping[str, Any]]


def to_torch(
    torchs: Mapping[str, Any],
    groups: Groups,
    layers: Mapping[str, Layer],
    blocks: Mapping[str, LayerCurvature],
    motions: Mapping[str, LayerMotion],
    whole: Mapping[str, Any],
) -> dict[str, Any]:
    """What `state_dict` returns.

    Args:
        torchs: what `torch.optim.Optimizer.state_dict` gave.
        groups: the optimizer's own.
        layers: by name.
        blocks: their curvature, of those that have any yet.
        motions: what was gathered of their gradients from step to step, likewise.
        whole: what belongs to the optimizer as a whole.
    """
    index = {parameter: position for position, parameter in enumerate(_parameters(groups))}
    state = {key: dict(values) for key, values in torchs["state"].items()}
    for name, block in blocks.items():
        state.setdefault(index[layers[name].weight], {})["curvature"] = _curvature_to_plain(block)
    for name, motion in motions.items():
        state.setdefault(index[layers[name].weight], {})["motion"] = _motion_to_plain(motion)
    described = {name: {"shape": _sizes(layer), "form": _form(layer)} for name, layer in layers.items()}
    saved = [{**group, "damping": to_plain(group["damping"])} for group in torchs["param_groups"]]
    saved[0][KEY] = {"format": FORMAT, **whole, "layers": described}
    return {"state": state, "param_groups": saved}


class SavedState:
    """A state that is to be loaded into an optimizer with the given layers and groups.

    Attributes:
        whole: what belongs to the optimizer as a whole.
    """

    def __init__(self, state_dict: Mapping[str, Any], layers: Mapping[str, Layer], groups: Groups) -> None:
        """Read a state.

        Raises:
            ValueError: for what is no state of this library, or of another version of it.
        """
        require_frame(state_dict)
        self._groups: list[dict[str, Any]] = [dict(group) for group in state_dict["param_groups"]]
        if not self._groups or KEY not in self._groups[0]:
            found = sorted(self._groups[0]) if self._groups else sorted(state_dict)
            raise ValueError(
                f"This is not the state of a tekfac optimizer: its first param group has no entry {KEY!r}, "
                f"only {found}."
            )
        self.whole: dict[str, Any] = self._groups[0].pop(KEY)
        written = self.whole.get("format") if isinstance(self.whole, Mapping) else None
        if written != FORMAT:
            raise ValueError(
                f"The saved state has format {written}, this version of tekfac reads format {FORMAT}. Load it "
                "with the version that saved it."
            )
        require_entries(self.whole)
        for place, group in enumerate(self._groups):
            require_group(place, group)
        self._layers = layers
        self._present = groups
        # Whatever stands for a parameter there, an index or a name, stands for the one in the same place here.
        keys = (key for group in self._groups for key in group["params"])
        index = {key: position for position, key in enumerate(keys)}
        self._state = {index[key]: dict(values) for key, values in state_dict["state"].items()}

    def require_method(self, method: str, recipe: Mapping[str, str]) -> None:
        """Raise ValueError for a state of another method, or measured in another way."""
        saved = self.whole["method"]
        if saved != method:
            raise ValueError(
                f"The saved state is that of {saved}, this optimizer is {method}. Load it into "
                f"tekfac.{saved}, or start {method} anew."
            )
        for key, value in recipe.items():
            saved_value = self.whole["recipe"].get(key, value)
            if saved_value != value and "auto" not in (saved_value, value):
                raise ValueError(
                    f"The saved statistics were taken with {key}={saved_value!r}, this optimizer "
                    f"has {key}={value!r}; they cannot be averaged. Make the optimizer with the saved setting."
                )

    def require_architecture(self) -> None:
        """Raise ValueError that names every layer and parameter in which the saved state differs."""
        differences = self._differing_layers() + self._differing_parameters()
        if differences:
            raise ValueError("The saved state is that of another architecture: " + "; ".join(differences) + ".")

    def require_sound(self) -> None:
        """Raise ValueError for numbers that no optimizer could have left, by their place."""
        for index, (name, parameter) in enumerate(self._named_parameters()):
            require_parameter(name, parameter, self._state.get(index, {}))
        positions = {parameter: index for index, parameter in enumerate(_parameters(self._present))}
        for layer in self._layers.values():
            require_layer(layer, self._state.get(positions[layer.weight], {}))

    def _named_parameters(self) -> list[tuple[str, Tensor]]:
        names = [name for group in self._present for name in group["param_names"]]
        return list(zip(names, _parameters(self._present), strict=True))

    def _differing_layers(self) -> list[str]:
        ours, theirs = self._layers, self.whole["layers"]
        differences = _only_in(ours, theirs, "layer")
        for name in ours.keys() & theirs.keys():
            sizes, form = _sizes(ours[name]), _form(ours[name])
            if theirs[name]["shape"] != sizes:
                differences.append(
                    f"layer {name!r} has blocks {sizes} (groups, out, in), saved {theirs[name]['shape']}"
                )
            if theirs[name]["form"] != form:
                differences.append(
                    f"layer {name!r} keeps its sides as {form} (blocks of outputs, blocks of inputs, "
                    "precision, and a kernel whose frequencies leave out the bias), saved "
                    f"{theirs[name]['form']}: give the same max_dim, large_dims, curvature_dtype"
                )
        return differences

    def _differing_parameters(self) -> list[str]:
        ours = [list(group["param_names"]) for group in self._present]
        theirs = [list(group["param_names"]) for group in self._groups]
        our_names, their_names = ({name for group in groups for name in group} for groups in (ours, theirs))
        differences = _only_in(our_names, their_names, "parameter")
        if our_names != their_names:
            return differences
        if ours != theirs:
            return [f"the param groups hold other parameters: {ours} here, {theirs} in the saved state"]
        names = [name for group in ours for name in group]
        parameters = _parameters(self._present)
        for index, values in self._state.items():
            velocity = values.get("momentum_buffer", values.get("exp_avg"))
            if isinstance(velocity, Tensor) and velocity.shape != parameters[index].shape:
                differences.append(
                    f"parameter {names[index]!r} has shape {list(parameters[index].shape)}, saved "
                    f"{list(velocity.shape)}"
                )
        return differences

    def for_torch(self) -> dict[str, Any]:
        """What `torch.optim.Optimizer.load_state_dict` is to get: all but what belongs to layers."""
        parameters = _parameters(self._present)
        position = iter(range(len(parameters)))
        return {
            "state": {
                index: {
                    key: _copied(value, parameters[index])
                    for key, value in values.items()
                    if key not in OF_LAYERS
                }
                for index, values in self._state.items()
            },
            "param_groups": [
                {
                    **group,
                    "params": [next(position) for _ in group["params"]],
                    "damping": from_plain(group["damping"]),
                }
                for group in self._groups
            ],
        }

    def averages(self) -> dict[Tensor, dict[str, Tensor]]:
        """Of the gradients of parameters without a block, in the precision that they were saved in."""
        return {
            parameter: {key: cut_like(own[key].to(parameter.device, copy=True), parameter) for key in AVERAGES}
            for position, parameter in enumerate(_parameters(self._present))
            if AVERAGES[0] in (own := self._state.get(position, {}))
        }

    def blocks(self) -> dict[str, LayerCurvature]:
        """The curvature of the layers that had any, on the devices of their weights."""
        return {
            name: _curvature_from_plain(plain, self._layers[name].weight.device)
            for name, plain in self._of_layers("curvature")
        }

    def motions(self) -> dict[str, LayerMotion]:
        """What was gathered of the gradients of the layers that had any."""
        return {
            name: _motion_from_plain(plain, self._layers[name].weight.device)
            for name, plain in self._of_layers("motion")
        }

    def _of_layers(self, entry: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        index = {parameter: position for position, parameter in enumerate(_parameters(self._present))}
        for name, layer in self._layers.items():
            plain = self._state.get(index[layer.weight], {}).get(entry)
            if plain is not None:
                yield name, plain


def _curvature_to_plain(curvature: LayerCurvature) -> dict[str, Any]:
    basis = curvature.basis._replace(scale=curvature.basis.scale.clone())  # may be the moments' own
    plain = {
        "moments": {**curvature.moments.values._asdict(), **_weights(curvature.moments)},
        "basis": basis._asdict(),
        "failed_refreshes": curvature.failed_refreshes,
    }
    theta = curvature.theta
    return plain if theta is None else {**plain, "theta": {"value": theta.values[0], **_weights(theta)}}


def _weights(average: Average[Any]) -> dict[str, float]:
    return {"weight": average.weight, "squares": average.squares}


def _curvature_from_plain(plain: Mapping[str, Any], device: torch.device) -> LayerCurvature:
    """The curvature that was saved, with copies of the tensors on the given device."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.to(device, copy=True)

    moments, theta = dict(plain["moments"]), plain.get("theta")
    weight, squares = moments.pop("weight"), moments.pop("squares")
    return LayerCurvature(
        Average(KroneckerFactors(**{key: copy(value) for key, value in moments.items()}), weight, squares),
        Eigenbasis(**{key: copy(value) for key, value in plain["basis"].items()}),
        None if theta is None else Average((copy(theta["value"]),), theta["weight"], theta["squares"]),
        plain["failed_refreshes"],
    )


def _motion_to_plain(motion: LayerMotion) -> dict[str, Any]:
    return {name: average._asdict() for name, average in motion._asdict().items() if average is not None}


def _motion_from_plain(plain: Mapping[str, Any], device: torch.device) -> LayerMotion:
    first, second = (
        Moving(own["value"].to(device, copy=True), own["weight"]) if own is not None else None
        for own in (plain.get("first"), plain.get("second"))
    )
    return LayerMotion(first, second)


def _parameters(groups: Groups) -> list[Tensor]:
    """In the order in which torch counts them."""
    return [parameter for group in groups for parameter in group["params"]]


def _copied(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return cut_like(value.clone(), parameter) if value.shape == parameter.shape else value.clone()


def _sizes(layer: Layer) -> list[int]:
    return [layer.shape.groups, layer.shape.d_out, layer.shape.d_in]


def _form(layer: Layer) -> list[Any]:
    """In blocks of which size, in which precision, and by which frequencies the sides of a block are kept."""
    shape = layer.shape
    return [shape.block_out, shape.block_in, str(layer.dtype), *([list(shape.kernel)] if shape.kernel else [])]


def _only_in(ours: Iterable[str], theirs: Iterable[str], what: str) -> list[str]:
    """What only one of the two sides has, in words."""
    only_theirs, only_ours = sorted(set(theirs) - set(ours)), sorted(set(ours) - set(theirs))
    return [f"{what} {name!r} is in the saved state only" for name in only_theirs] + [
        f"{what} {name!r} is not in the saved state" for name in only_ours
    ]
