"""The optimizer: clocks, param groups, and a `step()` that reads like the paper's Algorithm 1."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, Unpack, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tekfac.capture.hooks import Capture
from tekfac.curvature.blocks.block_diagonal import BlockDiagonal
from tekfac.curvature.blocks.kronecker import KroneckerBlock
from tekfac.curvature.layer_curvature import Due, NonFiniteStatisticsError, Recipe
from tekfac.curvature.network import LayerSignals, NetworkCurvature
from tekfac.damping import DampingRule, as_rule
from tekfac.layers.layer import Layer
from tekfac.likelihoods import as_likelihood
from tekfac.methods import Method, default_settings, paper_settings, refused_settings
from tekfac.optim import messages, state
from tekfac.optim.model_layers import Roster
from tekfac.optim.settings import Keywords, check_group, documented, resolve, signature
from tekfac.optim.update import apply_update, kl_coefficient

MAX_ATTEMPTS = 3
"""Steps in a row that are watched for the sake of layers without statistics."""


class NaturalGradient(Optimizer):
    """What the four optimizers share. A concrete class names its `method` and nothing else.

    Attributes:
        method: the row of the table in methods.py.
        num_steps: steps taken (k in Algorithm 1); skipped ones do not count.
        skipped_steps: steps that were not taken because of non-finite numbers.
    """

    method: ClassVar[Method]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = signature(default_settings(cls.method), refused_settings(cls.method))
        cls.__signature__ = own  # type: ignore[attr-defined]
        cls.__doc__ = documented(cls.__doc__ or "", own.parameters)

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        **keywords: Unpack[Keywords],
    ) -> None:
        name = type(self).__name__
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{name} needs the model itself, to see its layers' inputs and outputs; got "
                f"{type(model).__name__}. Write {name}(model, ...), not {name}(model.parameters(), ...)."
            )
        settings = resolve(
            name,
            keywords,
            default_settings(self.method),
            refused_settings(self.method),
            self.method.factors.sharings,
        )
        self._settings = settings
        self._own_damping = self.method.own_damping(settings.trace_floor, settings.beta)
        recipe = Recipe(
            factors=self.method.factors,
            rescaling=self.method.rescaling,
            sharing=settings.sharing,
            factor_decay=settings.factor_decay,
            rescaling_decay=settings.rescaling_decay,
            averaging=settings.averaging,
            memory_budget=settings.memory_budget,
        )
        self._roster = Roster(name, model, settings)
        self._network = NetworkCurvature(self._layers, recipe)
        self._reported: set[str] = set()
        self._attempts: dict[str, int] = {}
        self.num_steps = 0
        self.skipped_steps = 0
        self._skipped_in_a_row = 0
        self._refresh_seconds = 0.0
        first_order_lr = lr if settings.first_order_lr is None else settings.first_order_lr
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "damping": settings.damping,
            "first_order": False,
        }
        super().__init__(self._roster.param_groups(first_order_lr), defaults)
        self._first_order_ratio = first_order_lr / lr
        self._require_whole_layers()
        self._network.check_rules(self._damping_rules())
        self._capture = Capture(
            model,
            self._layers.values(),
            likelihood=as_likelihood(settings.likelihood),
            fisher=settings.fisher,
            loss_reduction=settings.loss_reduction,
            batch_dim=settings.batch_dim,
            outputs=settings.outputs,
            padding_mask=settings.padding_mask,
            grad_scaler=settings.grad_scaler,
            seed=torch.initial_seed() if settings.seed is None else settings.seed,
        )
        self._capture.before_pass = weakref.WeakMethod(self._before_pass)
        self._arm()

    @classmethod
    def paper(cls, model: nn.Module, **overrides: Any) -> Self:
        """The optimizer with the paper's reading of every setting; keywords override single ones."""
        return cls(model, **{**paper_settings(cls.method), **overrides})

    # -- what is where ---------------------------------------------------------------------------------

    @property
    def _layers(self) -> dict[str, Layer]:
        return self._roster.layers

    @property
    def _names(self) -> dict[Tensor, str]:
        return self._roster.names

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for any torch optimizer.

        Layers that the model has got meanwhile, and whose parameters are in the group, are preconditioned from
        the next step that measures on. Parameters of no layer are first-order.
        """
        check_group({**self.defaults, **param_group})
        messages.unknown_keys(type(self).__name__, param_group, self.defaults)
        super().add_param_group(param_group)
        if hasattr(self, "_capture"):
            self._look_again()
            late = [p for p in self.param_groups[-1]["params"] if p not in self._names]
            messages.late_parameters(type(self).__name__, len(late))

    def _before_pass(self) -> None:
        """What is checked when a forward pass that will be measured begins."""
        self._look_again_if_frozen_or_unfrozen()
        self._roster.report_strangers(self.param_groups)

    def _look_again_if_frozen_or_unfrozen(self) -> None:
        if self._roster.was_frozen_or_unfrozen():
            self._look_again()

    def _look_again(self) -> None:
        """Look through the model again; layers that are what they were keep their curvature."""
        kept = self._roster.look_again(self.param_groups)
        if kept is None:
            return
        self._network.layers = self._layers
        self._network.blocks = {n: block for n, block in self._network.blocks.items() if n in kept}
        self._require_whole_layers()
        self._network.check_rules(self._damping_rules())
        waiting = [n for n, layer in self._layers.items() if layer.weight.requires_grad]
        self._attempts = {name: 0 for name in waiting if name not in self._network.blocks}
        self._capture.watch(self._layers.values())
        self._arm()

    def _require_whole_layers(self) -> None:
        """A layer's weight and bias may differ in lr, momentum and weight decay, not in damping."""
        groups = self._group_of()
        for layer in self._layers.values():
            dampings = [groups[parameter]["damping"] for parameter in layer.parameters]
            if any(damping != dampings[0] for damping in dampings):
                raise ValueError(
                    f"Weight and bias of layer {layer.name!r} are preconditioned together but their "
                    f"param groups have different damping: {dampings}. Give both the same."
                )

    def _damping_rules(self) -> dict[str, DampingRule]:
        groups = self._group_of()
        return {
            name: as_rule(groups[layer.weight]["damping"], self._own_damping)
            for name, layer in self._layers.items()
        }

    def _group_of(self) -> dict[Tensor, dict[str, Any]]:
        return {p: group for group in self.param_groups for p in group["params"]}

    # -- the step --------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step of Algorithm 1.

        Args:
            closure: re-evaluates the model and returns the loss; called once, with gradients enabled.

        Returns:
            The closure's loss, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.autocast(next(iter(self._names)).device.type, enabled=False):
            problem = self._try_step(loss)
        if problem is not None:
            self._skip(problem)
        return loss

    def _try_step(self, loss: object) -> str | None:
        """Take the step, or say what keeps it from being taken; then nothing has changed."""
        if isinstance(loss, Tensor | float) and not bool(torch.isfinite(torch.as_tensor(loss)).all()):
            return f"the loss is {float(loss)}"
        if self._capture.problems:
            return "; ".join(self._capture.problems)
        # Factors, eigenbasis, re-scaling: new values, which replace the old ones only if all are finite.
        due, batches, before = self._due(), self._capture.batches, self._network.blocks
        start = time.perf_counter()
        try:
            blocks = self._network.refreshed(batches, due)
        except NonFiniteStatisticsError as error:
            return str(error)
        finally:
            self._refresh_seconds += time.perf_counter() - start
        if due.basis or batches:
            self._network.blocks = blocks
        # Precondition.
        try:
            directions = self._directions()
        except Exception:
            self._network.blocks = before
            raise
        problem = self._non_finite(directions)
        if problem is not None:
            self._network.blocks = before
            return problem
        # Update.
        self._capture.clear()
        self._update(directions)
        self._note_unseen()
        self.num_steps += 1
        self._skipped_in_a_row = 0
        self._look_again_if_frozen_or_unfrozen()
        self._arm()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and the statistics of the backward passes that made them."""
        self._capture.roll_back()
        super().zero_grad(set_to_none)

    def _arm(self) -> None:
        """Watch the next forward pass if its step measures, or if a layer waits for its first statistics.

        A layer that was not seen in a few watched steps waits for the next step that measures anyway.
        """
        waiting = any(attempts < MAX_ATTEMPTS for attempts in self._attempts.values())
        self._capture.armed = self._due().anything or waiting or not self._network.blocks

    def _due(self) -> Due:
        """What Algorithm 1 refreshes at the present step."""
        settings, k = self._settings, self.num_steps
        return Due(
            factors=k % settings.factors_every == 0,
            basis=k % settings.basis_every == 0,
            rescaling=self.method.rescaling.measured and k % settings.rescaling_every == 0,
        )

    def _directions(self) -> dict[Tensor, Tensor]:
        """What each parameter with a gradient moves along: the natural gradient, clipped, or the raw one."""
        groups = self._group_of()
        raw = {
            p: p.grad.to_dense() if p.grad.is_sparse else p.grad
            for p in groups
            if p.grad is not None and p.requires_grad
        }
        natural = self._network.natural_gradients(raw, self._damping_rules())
        clip = self._settings.kl_clip
        if clip is not None and natural:
            coefficient = kl_coefficient(
                ((groups[p]["lr"], raw[p], direction) for p, direction in natural.items()), clip
            )
            natural = {p: direction * coefficient.to(direction.dtype) for p, direction in natural.items()}
        unseen = {p: raw[p] * self._first_order_ratio for p in self._unseen_parameters() if p in raw}
        return {**raw, **unseen, **natural}

    def _unseen_parameters(self) -> list[Tensor]:
        """Parameters of layers without statistics; their raw gradient is meant for `first_order_lr`."""
        unseen = (layer for name, layer in self._layers.items() if name not in self._network.blocks)
        return [parameter for layer in unseen for parameter in layer.parameters]

    def _update(self, directions: Mapping[Tensor, Tensor]) -> None:
        """Move the parameters."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p in directions]
            apply_update(
                trained,
                [directions[p] for p in trained],
                [self._velocity(p) for p in trained] if group["momentum"] else [],
                lr=group["lr"],
                momentum=group["momentum"],
                weight_decay=group["weight_decay"],
            )

    def _velocity(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]  # type: ignore[no-any-return]

    # -- what can go wrong in a step -------------------------------------------------------------------

    def _non_finite(self, directions: Mapping[Tensor, Tensor]) -> str | None:
        """Which parameters would move along something that is not finite, in words."""
        directions = {p: direction for p, direction in directions.items() if direction.numel()}
        if not directions:
            return None
        largest = torch._foreach_norm(list(directions.values()), float("inf"))
        finite = torch.stack([torch.isfinite(norm) for norm in largest])
        if bool(finite.all()):
            return None
        bad = [
            self._names.get(p, "a parameter") for p, good in zip(directions, finite, strict=True) if not good
        ]
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        return f"the gradient of {', '.join(bad[:3])}{more} is not finite"

    def _skip(self, problem: str) -> None:
        """Leave everything as it was before this step's forward pass."""
        self._capture.roll_back()
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        parameters = (p for group in self.param_groups for p in group["params"])
        diverged = not all(bool(torch.isfinite(p).all()) for p in parameters)
        messages.skipped_step(
            type(self).__name__, self.num_steps, self.skipped_steps, self._skipped_in_a_row, problem, diverged
        )

    def _note_unseen(self) -> None:
        """Keep count of layers that have a gradient but no statistics, and say so once of each."""
        unseen = []
        for name, layer in self._layers.items():
            if name in self._network.blocks:
                self._attempts.pop(name, None)
            elif layer.weight.grad is not None or name in self._attempts:
                self._attempts[name] = self._attempts.get(name, 0) + self._capture.armed
                if layer.weight.grad is not None and self._capture.armed:
                    unseen.append(name)
        new = [name for name in unseen if name not in self._reported]
        if new:
            self._reported.update(new)
            messages.unseen_layers(type(self).__name__, new, self._capture.why_nothing_came)

    @property
    def curvature(self) -> BlockDiagonal[KroneckerBlock]:
        """The Fisher block of every layer seen so far, by layer name, as it is now (see tekfac.fisher)."""
        return self._network.block_diagonal()

    def signals(self) -> dict[str, LayerSignals]:
        """Trace, damping and condition of every layer seen so far, by layer name: for logs and monitors."""
        return self._network.signals(self._damping_rules())

    @property
    def steps_since_refresh(self) -> int:
        """Steps taken since a refresh of the eigenbasis was last due (its staleness)."""
        return (self.num_steps - 1) % self._settings.basis_every if self.num_steps else 0

    @property
    def curvature_seconds(self) -> float:
        """Time spent on curvature so far: in backward passes that were measured, and on refreshing.

        By the clock of the host; work that an accelerator has queued and not finished is not in it.
        """
        return self._capture.seconds + self._refresh_seconds

    @property
    def failed_refreshes(self) -> int:
        """How many eigendecompositions failed for good; an older basis was kept each time."""
        return sum(curvature.failed_refreshes for curvature in self._network.blocks.values())

    # -- state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later step depends on, keyed by layer and parameter name.

        Plain dicts, lists, numbers, strings and tensors: torch.load(weights_only=True) reads it.
        """
        self._capture.drop_what_was_zeroed()
        return {
            **state.named_state(super().state_dict(), self.param_groups, self._names),
            "method": self.method.name,
            "num_steps": self.num_steps,
            "skipped_steps": self.skipped_steps,
            "attempts": dict(self._attempts),
            "recipe": self._recipe_in_words(),
            "sampling": self._capture.sampling.state(),
            "layers": {
                name: state.layer_to_plain(layer, self._network.blocks.get(name))
                for name, layer in self._layers.items()
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the saved optimizer stopped, bit for bit.

        Raises:
            ValueError: if the state belongs to another method or another architecture; the message
                names what differs. Nothing is changed then.
        """
        self._look_again_if_frozen_or_unfrozen()
        state.require_same_method(state_dict, self.method.name, self._recipe_in_words())
        state.require_same_architecture(state_dict, self._layers, self._names, self.param_groups)
        blocks = {
            name: state.curvature_from_plain(plain["curvature"], self._layers[name].weight.device)
            for name, plain in state_dict["layers"].items()
            if plain["curvature"] is not None
        }
        super().load_state_dict(state.indexed_state(state_dict, self.param_groups, self._names))
        self._network.blocks = blocks
        self.num_steps = state_dict["num_steps"]
        self.skipped_steps = state_dict["skipped_steps"]
        self._attempts = dict(state_dict["attempts"])
        self._capture.clear()
        self._capture.sampling.load(state_dict["sampling"])
        self._arm()

    def _recipe_in_words(self) -> dict[str, str]:
        """The settings that statistics must share to be averaged with one another."""
        return {"sharing": self._settings.sharing, "averaging": self._settings.averaging}

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} watches a live model and cannot be copied or pickled. Save its "
            "state_dict() and load that into an optimizer made for the other model."
        )
