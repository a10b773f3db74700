"""What an optimizer will do with a model, told before training: a table of its layers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from torch import nn

from tekfac import methods
from tekfac.common.checks import require_whole
from tekfac.common.tables import aligned, in_bytes, in_flops
from tekfac.layers import side_forms
from tekfac.layers.inventory import Inventory, take_inventory
from tekfac.layers.layer import Layer
from tekfac.layers.names import named_parameters
from tekfac.layers.registry import kind_of
from tekfac.optim.param_groups import left_to_first_order, resolved_groups
from tekfac.optim.schedule import FLOPS_OF_EIGENDECOMPOSITION, Intervals, Schedule
from tekfac.optim.settings import Settings, resolve
from tekfac.optim.work_costs import Machine, StepCosts, costs_of
from tekfac.optim.work_plan import Measures, WorkPlan, planned

HEADER = ("layer", "module", "block", "inputs", "outputs", "parameters", "memory", "refresh")


@dataclass(frozen=True)
class LayerPlan:
    """How one layer will be treated.

    Attributes:
        name: of the layer.
        module: type of its module, or of its modules.
        treatment: what its block is, in words.
        inputs: d_in (the bias's 1 included), and the form of that side.
        outputs: d_out, likewise.
        parameters: how many it has.
        memory: bytes that its curvature takes.
        refresh_flops: floating-point operations of its eigendecompositions, each time the basis is refreshed.
        frozen: whether it is frozen: then it costs nothing, until it is unfrozen.
    """

    name: str
    module: str
    treatment: str
    inputs: str
    outputs: str
    parameters: int
    memory: int
    refresh_flops: int
    frozen: bool = False


@dataclass(frozen=True)
class FirstOrder:
    """A parameter that is trained by first order: AdamW, unless the settings say SGD.

    Attributes:
        name: of the parameter.
        parameters: how many numbers it has.
        reason: why it has no block.
        frozen: whether it is frozen, and not trained at all.
    """

    name: str
    parameters: int
    reason: str
    frozen: bool = False


@dataclass(frozen=True)
class Explanation:
    """What an optimizer will do with a model.

    Attributes:
        method: of the optimizer.
        layers: those that are preconditioned.
        first_order: the parameters that are not.
        first_order_step: what moves these.
        work: who decomposes what, and what is sent, by several processes; None: one process was asked for.
        costs: seconds of a step by counting; None: no rates were given.
    """

    method: str
    layers: tuple[LayerPlan, ...]
    first_order: tuple[FirstOrder, ...]
    first_order_step: str
    work: WorkPlan | None = None
    costs: StepCosts | None = None

    @property
    def trained(self) -> tuple[LayerPlan, ...]:
        """The layers that are not frozen."""
        return tuple(layer for layer in self.layers if not layer.frozen)

    @property
    def parameters(self) -> int:
        """How many are preconditioned."""
        return sum(layer.parameters for layer in self.trained)

    @property
    def memory(self) -> int:
        """Bytes that all curvature takes; frozen layers have none."""
        return sum(layer.memory for layer in self.trained)

    @property
    def refresh_flops(self) -> int:
        """Floating-point operations of all eigendecompositions; frozen layers have none."""
        return sum(layer.refresh_flops for layer in self.trained)

    @property
    def share(self) -> float:
        """Of the parameters that are not frozen: how many are preconditioned."""
        others = sum(parameter.parameters for parameter in self.first_order if not parameter.frozen)
        return self.parameters / max(1, self.parameters + others)

    def __repr__(self) -> str:
        return (
            f"Explanation({self.method}: {len(self.layers)} layers with {self.share:.0%} of the parameters, "
            f"{in_bytes(self.memory)} of curvature)"
        )

    def __str__(self) -> str:
        rows = [
            (
                layer.name or "(the model)",
                layer.module,
                f"{layer.treatment}; frozen" if layer.frozen else layer.treatment,
                layer.inputs,
                layer.outputs,
                f"{layer.parameters:,}",
                in_bytes(layer.memory),
                in_flops(layer.refresh_flops),
            )
            for layer in self.layers
        ]
        total = (
            "",
            "",
            "",
            "",
            "",
            f"{self.parameters:,}",
            in_bytes(self.memory),
            in_flops(self.refresh_flops),
        )
        lines = aligned([HEADER, *rows, total], right_from=5)
        lines.insert(-1, "-" * max(map(len, lines)))
        covers = f"{len(self.trained)} layer(s), {self.share:.0%} of the trainable parameters"
        lines.append(f"{self.method} preconditions {covers}.")
        if self.first_order:
            others = [
                (f"  {p.name}", f"{p.parameters:,}", f"frozen; {p.reason}" if p.frozen else p.reason)
                for p in self.first_order
            ]
            lines += ["", f"By {self.first_order_step}, on the raw gradient:", *aligned(others, right_from=3)]
        for more in (self.work, self.costs):
            lines += [] if more is None else ["", str(more)]
        return "\n".join(lines)


def explain(
    model: nn.Module,
    *,
    method: str = "tekfac",
    ranks: int = 1,
    machine: Mapping[str, float] | None = None,
    file: TextIO | None = sys.stdout,
    **settings: Any,
) -> Explanation:
    """Print what an optimizer will do with a model, layer by layer.

    Args:
        model: the model, as the optimizer would get it.
        method: "kfac", "ekfac", "tkfac" or "tekfac".
        ranks: of several processes under DistributedDataParallel also who decomposes what, and what is sent.
            With turns="auto" that is told for all layers at once.
        machine: rates, for seconds of a step by counting. "flops", operations per second of one process, and
            "link", bytes per second that each can send, are needed; "eigh_flops", operations per second of
            decompositions (else like others), "latency", seconds of a message, "step_flops", operations of a
            forward and backward pass of one process, and "samples" in it are not.
        file: where to print; None: nowhere.
        settings: keywords of the optimizer, as it would get them (`max_dim`, `first_order`, ...).

    Returns:
        The table as data; its `str` is what was printed.

    Raises:
        TypeError: for something that is no model, and for keywords that do not exist.
        ValueError: for settings and rates that do not fit.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain needs a model (nn.Module), got {type(model).__name__}.")
    require_whole("ranks", ranks, "of processes, at least 1")
    rates = None if machine is None else Machine.of(machine)
    chosen = methods.named(method)
    resolved = resolve(chosen, settings)
    groups = resolved_groups(model, resolved.param_groups)
    left_out = left_to_first_order(model, resolved.first_order, groups)
    inventory = take_inventory(
        model,
        left_out,
        resolved.side_rule,
        resolved.curvature_dtype,
        norms=resolved.precondition_norms,
    )
    work = _work(inventory, chosen, resolved, ranks) if ranks > 1 or rates is not None else None
    explanation = Explanation(
        chosen.name,
        tuple(
            _plan(layer, entrywise=chosen.rescaling.measured, moving=resolved.is_moving)
            for layer in inventory.layers.values()
        ),
        tuple(_first_order(model, inventory)),
        {"adamw": "AdamW", "sgd": "momentum SGD"}[resolved.first_order_step],
        work if ranks > 1 else None,
        None if rates is None or work is None else costs_of(model, inventory.layers.values(), work, rates),
    )
    if file is not None:
        print(explanation, file=file)
    return explanation


def _work(inventory: Inventory, method: methods.Method, settings: Settings, ranks: int) -> WorkPlan:
    """Of several processes; frozen layers have no part in it."""
    layers = {name: own for name, own in inventory.layers.items() if own.weight.requires_grad}
    rescaling = method.rescaling.measured and not settings.is_moving
    intervals = Intervals(
        settings.factors_every, settings.basis_every, settings.rescaling_every if rescaling else None
    )
    turns = Schedule(intervals, layers, by_turns=settings.turns is True).turns
    measures = Measures(
        intervals,
        counts_inputs=not method.factors.trace_restricted,
        may_cut=not settings.basis_tolerance and not settings.track_basis,
    )
    return planned(list(layers.values()), turns, ranks, measures)


def _plan(layer: Layer, *, entrywise: bool, moving: bool) -> LayerPlan:
    shape = layer.shape
    block_in, block_out = shape.block_in or shape.d_in, shape.block_out or shape.d_out
    return LayerPlan(
        name=layer.name,
        module=" + ".join(dict.fromkeys(type(use.module).__name__ for use in layer.uses)),
        treatment=_treatment(layer),
        inputs=side_forms.in_words(shape.d_in, block_in, shape.kernel),
        outputs=side_forms.in_words(shape.d_out, block_out),
        parameters=shape.size,
        memory=_memory(layer, block_in, block_out, entrywise=entrywise, moving=moving),
        refresh_flops=shape.groups
        * (_eigen_flops(shape.d_in, block_in) + _eigen_flops(shape.d_out, block_out)),
        frozen=not layer.weight.requires_grad,
    )


def _treatment(layer: Layer) -> str:
    """What the block of a layer is, in words."""
    if layer.shape.layout == "units":
        return "unit by unit, exact"
    if layer.is_tied:
        return "table and output projection"
    if layer.is_table:
        return "table"
    return "Kronecker" if layer.shape.groups == 1 else f"Kronecker, {layer.shape.groups} groups"


def _memory(layer: Layer, block_in: int, block_out: int, *, entrywise: bool, moving: bool) -> int:
    """Bytes of moments, eigenbasis and re-scaling: measured or moving, every entry or their scale alone."""
    shape = layer.shape
    matrices = 2 * (shape.d_in * block_in + shape.d_out * block_out)  # moments, eigenvectors
    vectors = shape.d_in + shape.d_out + 2  # eigenvalues, two scales
    diagonal = shape.d_in * shape.d_out if entrywise else int(moving)
    return shape.groups * (matrices + vectors + diagonal) * layer.dtype.itemsize


def _eigen_flops(dim: int, block_size: int) -> int:
    if block_size == 1:
        return 0
    full, rest = divmod(dim, block_size)
    return FLOPS_OF_EIGENDECOMPOSITION * (full * block_size**3 + rest**3)


def _first_order(model: nn.Module, inventory: Inventory) -> Iterable[FirstOrder]:
    """What no layer has, with the reason."""
    covered = {parameter for layer in inventory.layers.values() for parameter in layer.parameters}
    holders = {
        parameter: module for module in model.modules() for parameter in module.parameters(recurse=False)
    }
    for name, parameter in named_parameters(model):
        if parameter in covered:
            continue
        holder = holders[parameter]
        reason = inventory.reasons.get(name)
        if reason is None:
            reason = f"{type(holder).__name__} has no block"
            reason += " of it" if kind_of(holder) is not None else " (tekfac.register_layer can give it one)"
        yield FirstOrder(name, parameter.numel(), reason, not parameter.requires_grad)
