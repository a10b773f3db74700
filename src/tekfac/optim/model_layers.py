"""The layers of the model that an optimizer was given, also when the model changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tekfac.layers.inventory import Inventory, take_inventory
from tekfac.layers.names import named_parameters
from tekfac.layers.registry import supported_types
from tekfac.optim import messages
from tekfac.optim.param_groups import completed_groups, left_to_first_order, resolved_groups
from tekfac.optim.settings import Settings

ParamGroups = Sequence[Mapping[str, Any]]


class ModelLayers:
    """What of a model belongs where.

    Attributes:
        model: the model.
        names: of its parameters, whatever is wrapped around it.
        layers: the layers to precondition, by name.
        watched: these, and those that will be among them if they are unfrozen.
    """

    def __init__(self, owner: str, model: nn.Module, settings: Settings) -> None:
        """Look through the model.

        Args:
            owner: the optimizer's name, for messages.
            model: the model.
            settings: of the optimizer.

        Raises:
            ValueError: for a model without any layer to precondition, or without data.
        """
        _require_data(owner, model)
        self.model = model
        self.names = _names_of(model)
        self._owner = owner
        self._settings = settings
        self._told: set[str] = set()
        self._given = resolved_groups(model, settings.param_groups)
        requested = left_to_first_order(model, settings.first_order, self._given)
        self._requested: frozenset[Tensor] = frozenset(requested)
        self._automatic = slice(len(self._given), len(self._given))
        inventory = self._inventory(requested)
        if not inventory.layers:
            why = "; ".join(f"{n}: {reason}" for n, reason in inventory.reasons.items())
            raise ValueError(
                f"{owner} found no layer to precondition in {type(model).__name__}"
                f"{' (' + why + ')' if why else ''}. It supports {', '.join(supported_types())}. Use "
                "torch.optim.SGD for this model, or tell of its layers: tekfac.register_layer."
            )
        messages.inventory(owner, inventory, self.names, self._told)
        self.layers = inventory.layers
        self.watched = {**inventory.layers, **inventory.dormant}
        self._trainable = self._is_trainable()

    def param_groups(self, first_order_lr: float | None) -> list[dict[str, Any]]:
        """The user's groups, then those for what is in none."""
        groups = completed_groups(self.model, self.layers.values(), self._given, first_order_lr)
        self._automatic = slice(len(self._given), len(groups))
        return groups

    def present_names(self) -> dict[Tensor, str]:
        """Of the model's parameters, those that it has got meanwhile included."""
        return _names_of(self.model)

    def was_frozen_or_unfrozen(self) -> bool:
        """Whether some parameter was, since the model was last looked through."""
        return self._is_trainable() != self._trainable

    def look_again(self, groups: list[dict[str, Any]]) -> list[str] | None:
        """Look through the model again: it has got parameters, or some were frozen or unfrozen.

        Args:
            groups: the optimizer's present ones. What is in none of the user's goes where it belongs now.

        Returns:
            The names of the layers that are what they were; None if all are, and no other is there.
        """
        known, self.names = set(self.names), _names_of(self.model)
        self._trainable = self._is_trainable()
        automatic = {p for group in groups[self._automatic] for p in group["params"]}
        group_of = {p: group for group in groups for p in group["params"]}
        requested = {
            p for p in self.names if p not in group_of or (group_of[p]["first_order"] and p not in automatic)
        }
        inventory = self._inventory(requested | self._requested)
        before, found = self.layers, inventory.layers
        kept = [name for name, layer in found.items() if name in before and layer.is_same_as(before[name])]
        self.watched = {**found, **inventory.dormant}
        unchanged = list(before) == list(found) == kept
        if not unchanged or set(self.names) != known:
            messages.inventory(self._owner, inventory, self.names, self._told)
        if unchanged:
            return None
        self.layers = found
        self._sort(groups[self._automatic])
        return kept

    def report_strangers(self, groups: ParamGroups) -> None:
        """Say once which parameters the model has got that are in no group."""
        ours = {p for group in groups for p in group["params"]}
        strange = [n for p, n in _names_of(self.model).items() if p.requires_grad and p not in ours]
        messages.strange_parameters(self._owner, strange, self._told)

    def _inventory(self, requested: Iterable[Tensor]) -> Inventory:
        settings = self._settings
        return take_inventory(
            self.model,
            requested,
            settings.side_rule,
            settings.curvature_dtype,
            norms=settings.precondition_norms,
        )

    def _is_trainable(self) -> list[bool]:
        """Of every parameter, whether it is not frozen now."""
        return [parameter.requires_grad for parameter in self.names]

    def _sort(self, automatic: list[dict[str, Any]]) -> None:
        """Put what no group of the user's has to the layers, or to the rest."""
        if len(automatic) < 2:
            return
        of_layers, of_others = automatic
        in_layers = {p for layer in self.layers.values() for p in layer.parameters}
        ours = {p for group in automatic for p in group["params"]}
        of_layers["params"] = [p for p in self.names if p in ours and p in in_layers]
        of_others["params"] = [p for p in self.names if p in ours and p not in in_layers]
        for group in automatic:
            group["param_names"] = [self.names[p] for p in group["params"]]


def _names_of(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in named_parameters(model)}


def _require_data(owner: str, model: nn.Module) -> None:
    """Raise ValueError for parameters on the meta device."""
    empty = [name for name, parameter in named_parameters(model) if parameter.is_meta]
    if empty:
        raise ValueError(
            f"{owner} needs a model with data; {len(empty)} of its parameters ({empty[0]}, ...) are on the "
            "meta device. Give them data first, by model.to_empty(device=...) and the model's own "
            "initialisation or load_state_dict, which makes new parameters; then make the optimizer."
        )
