"""The optimizer: clocks, param groups, and a `step()` that reads like the paper's Algorithm 1."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Never, Self, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tekfac.capture.capture import Capture
from tekfac.capture.measurement import FisherKind, LikelihoodSetting, LossReduction
from tekfac.capture.outputs import OutputSelector
from tekfac.capture.padding import PaddingMask
from tekfac.capture.selection import StatisticsSamples
from tekfac.common.interrupts import Uninterrupted
from tekfac.common.phases import Phase
from tekfac.common.precision import without_autocast
from tekfac.curvature.blocks.block_diagonal import BlockDiagonal
from tekfac.curvature.blocks.kronecker import KroneckerBlock
from tekfac.curvature.layer_curvature import Due, LayerCurvature, NonFiniteStatisticsError, Recipe
from tekfac.curvature.motion import LayerMotion, StepForm
from tekfac.curvature.network import LayerSignals, NetworkCurvature
from tekfac.curvature.rescaling import PRODUCT
from tekfac.curvature.residuals import off_diagonal
from tekfac.curvature.stacks import StepInputs
from tekfac.damping import BetaReading, DampingRule, LevenbergMarquardt, as_rule
from tekfac.guard import DivergenceError, Guard, as_guard
from tekfac.layers.layer import Layer
from tekfac.layers.side_forms import LargeDims, MaxDim
from tekfac.likelihoods import Likelihood
from tekfac.methods import Method, natural_settings, paper_settings
from tekfac.optim import messages
from tekfac.optim.closures import Evaluation
from tekfac.optim.divergence import OF_SCHEDULES, Snapshot, Watch, as_number, raised
from tekfac.optim.first_order import adam_directions
from tekfac.optim.health import Health, health_of
from tekfac.optim.model_layers import ModelLayers
from tekfac.optim.param_groups import Selected, named, selected_parameters
from tekfac.optim.quadratic_model import Move
from tekfac.optim.refresh_log import RefreshLog
from tekfac.optim.schedule import WORTH_TURNS, Intervals, Schedule, cost_of_refresh, first_interval
from tekfac.optim.settings import (
    AUTO,
    DEFAULT_BASIS_TOLERANCE,
    NAMES,
    Averaging,
    DecayPer,
    FirstOrderStep,
    MomentumAt,
    Rescaling,
    check_group,
    require_finite_rates,
    resolve,
)
from tekfac.optim.skipping import Skipping, all_finite, in_words, longest_direction, squares_are_finite
from tekfac.optim.state import SavedState, to_torch
from tekfac.optim.step_control import judged_step
from tekfac.optim.update import apply_update, kl_coefficient
from tekfac.ranks.group import ALONE, GroupSetting, Ranks, ranks_of, require_still_alone
from tekfac.ranks.replicas import require_same, values_of
from tekfac.ranks.shards import is_sharded, of_all_parts, own_part, part_of, require_supported, wholes

MAX_ATTEMPTS = 3
"""Steps in a row that are watched for the sake of layers without statistics."""


class NaturalGradient(Optimizer):
    """What the four optimizers share. A concrete class names its `method` and nothing else.

    Attributes:
        method: the row of the table in methods.py.
    """

    method: ClassVar[Method]

    def __init__(
        self,
        model: nn.Module,
        lr: float = 3e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        # the step
        power: float = 0.5,
        rescaling: Rescaling = "moving",
        momentum_at: MomentumAt = "before",
        nesterov: bool = True,
        step_scale: float | Literal["auto"] = "auto",
        kl_clip: float | None = None,
        damping: float | DampingRule | Literal["auto"] | None = "auto",
        trace_floor: float | None = None,
        beta: BetaReading | None = None,
        # curvature
        factors_every: int = 50,
        basis_every: int = 50,
        rescaling_every: int | None = None,
        interval_growth: float | None = 0.1,
        first_interval: int | Literal["auto"] = "auto",
        factor_decay: float = 0.95,
        rescaling_decay: float | None = None,
        decay_per: DecayPer = "step",
        sharing: Literal["auto", "exact", "expand", "reduce"] = "auto",
        averaging: Averaging | None = None,
        turns: bool | Literal["auto"] = "auto",
        basis_tolerance: float = DEFAULT_BASIS_TOLERANCE,
        track_basis: bool = False,
        # its measurement
        fisher: FisherKind | Literal["auto"] = "auto",
        statistics_samples: StatisticsSamples = "auto",
        likelihood: LikelihoodSetting = "auto",
        loss_reduction: LossReduction = "mean",
        batch_dim: int | Literal["auto"] = "auto",
        outputs: OutputSelector | None = None,
        padding_mask: PaddingMask | None = None,
        max_dim: MaxDim = "auto",
        large_dims: LargeDims = "auto",
        curvature_dtype: torch.dtype | None = None,
        memory_budget: int = 256 * 2**20,
        seed: int | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        # several processes
        process_group: GroupSetting = "auto",
        replica_check_every: int | None = None,
        # which parameters
        first_order: Selected | Iterable[Selected] = (),
        precondition_norms: bool = False,
        first_order_lr: float | None = None,
        first_order_step: FirstOrderStep = "adamw",
        param_groups: Iterable[Mapping[str, Any]] = (),
        # what goes wrong
        guard: bool | Guard = False,
        **unknown: Never,
    ) -> None:
        """Make the optimizer of a model; docs/settings.md says more of every keyword, and how to choose.

        Args:
            model: the network; tekfac.explain(model) tells which of its layers are preconditioned, and how.
            lr: step length; with the default step that of AdamW.
            momentum: weight of the past, in [0, 1), in the mean gradient, or in the velocity.
            weight_decay: decoupled: w <- (1 - lr * weight_decay) * w.
            power: of what the gradient is divided by in the eigenbasis: 1 for the natural gradient, 0.5 for its
                root, with which the scale of the loss does not matter.
            rescaling: whether second moments in the eigenbasis are "moving", taken from the gradient of every
                step, or "measured" on samples when curvature is.
            momentum_at: whether gradients are averaged "before" they are preconditioned, or the preconditioned
                ones are summed up in a velocity, "after".
            nesterov: whether gradients that are averaged before count twice, a step ahead.
            step_scale: what preconditioned directions are multiplied by, besides lr; "auto": 2 for the default
                step, which makes AdamW's learning rates fit, else 1.
            kl_clip: bound on lr^2 g.Pg, for the highest lr so far (times step_scale), to which the
                preconditioned gradient is shortened; None: no bound.
            damping: a number: S + damping * I; a rule of tekfac.damping; None: the paper's rule for this
                method; "auto": Relative(), a share of the mean of S, where that is moving; where it is
                measured, 0.01 added to S (EKFAC, TEKFAC), or its root to each factor (KFAC, TKFAC).
            trace_floor: vartheta: the least trace that the paper's damping is computed from; None: 0.01. A
                number asks for that damping. KFAC and EKFAC have none.
            beta: how the paper's damping treats linear layers beside convolutions: "add", "scale", "scale_all"
                or "convolution"; None: "add". A name asks for that damping. KFAC and EKFAC have none.
            factors_every: steps between updates of the factors, in the end.
            basis_every: steps between eigendecompositions, in the end.
            rescaling_every: steps between updates of Theta, where it is measured, in the end; None: 50. KFAC
                and TKFAC have none.
            interval_growth: these intervals are shorter at first: at most this share of the steps so far, so
                that curvature is measured often then; None: they are what they are from the first step on.
            first_interval: the shortest of intervals that grow; "auto": 1, so that the first steps all
                measure, or up to 5 where measuring takes many times as long as a step, as in small networks.
            factor_decay: weight of the past in the factors' running averages, in [0, 1).
            rescaling_decay: weight of the past in the running average of second moments, in [0, 1); None: 0.95.
                KFAC and TKFAC have none unless it is moving.
            decay_per: whether decays are per "step", so that intervals do not change how long the past counts
                (more than ten steps count as ten), or per "update".
            sharing: of weights over positions: "exact" (TKFAC and TEKFAC only), "expand" or "reduce"; "auto":
                "exact" where there is one, else "expand".
            averaging: of raw "moments", or of the normalised "factors"; None: "moments". KFAC and EKFAC have
                none.
            turns: whether layers are refreshed one after the other, a part of them at every step, so that no
                step takes much longer than another; "auto": where that costs nothing more (the empirical
                Fisher, on the CPU, of a model that is neither compiled nor tiny).
            basis_tolerance: how much of a factor may lie outside of the diagonal, as a share of its norm,
                before the eigenbasis is renewed; 0: it is at every refresh.
            track_basis: whether to renew an eigenbasis that is nearly right by one orthogonal iteration, which
                takes less time than a decomposition.
            fisher: "sampled" labels (from the model's own prediction), "empirical" or "exact"; "auto": sampled
                where the only prediction is Gaussian, else empirical, which costs no backward pass.
            statistics_samples: of each batch, drawn at random, that curvature is measured on; None: all;
                "auto": all where a layer uses its weights once per sample; else some or all in a few sums with
                random signs, where sharing is exact, or as many as the running averages still need.
            likelihood: "auto": what the gradient of the loss shows; "categorical", "bernoulli", "gaussian", a
                tekfac.likelihoods.Likelihood, or a callable (outputs, generator) -> losses of drawn labels; or
                a mapping of names of predictions to such.
            loss_reduction: how the loss adds up its terms: "mean", "batchmean" or "sum".
            batch_dim: the axis of the model's outputs that holds the samples; "auto": the first one, or the
                second one of sequence-first outputs, where layers that know their samples show it.
            outputs: a function from what the model returns to its prediction or predictions, where these are
                not all that get a gradient.
            padding_mask: the argument of the model, or a function of its arguments, that tells which positions
                are real; None: attention_mask and key padding masks are found.
            max_dim: inputs or outputs of a layer beyond which that side of its block takes a cheaper form;
                "auto": 64 for inputs of convolutions that are kept by frequencies, 800 for their other sides,
                200 for other layers; and blocks of at most 400, 400 and 136.
            large_dims: which: "frequencies" (of convolutions), "blocks", "diagonal"; "auto": blocks up to
                20,000 dimensions, and with max_dim="auto" frequencies for convolutions of 8 channels or more.
            curvature_dtype: torch.float32 or torch.float64; None: float32, or float64 for float64 parameters.
            memory_budget: bytes of working memory for the rows of one layer.
            seed: of the generator that draws labels; None: torch.initial_seed().
            grad_scaler: the loss scaler; only fisher="empirical" needs to know it.
            process_group: of processes that train together, with a part of every batch each; "auto": that of
                DistributedDataParallel, or else all processes; "alone": this one.
            replica_check_every: steps between two looks whether all of them have the same parameters; None:
                at the first step that measures alone.
            first_order: names, modules, their types or parameters that are not to be preconditioned.
            precondition_norms: whether norms have blocks; else they are trained as what is not preconditioned.
            first_order_lr: learning rate of what is not preconditioned; None: lr.
            first_order_step: what moves it: "adamw", or "sgd" with momentum.
            param_groups: groups with lr, momentum, weight_decay, damping or first_order of their own.
            guard: whether to go back to the last good snapshot where training diverges, and on with shorter
                steps; or a tekfac.guard.Guard. It looks at the loss of step(closure) or report_loss(loss).
            **unknown: there are no others; a misspelt one gets an error with the name that was probably meant.

        Raises:
            TypeError: for something that is no model, and for keywords that the method does not have.
            ValueError: for values that do not fit, and for a model without any layer to precondition.
        """
        given = {name: value for name, value in locals().items() if name in NAMES}
        name = type(self).__name__
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{name} needs the model itself, to see its layers' inputs and outputs; got "
                f"{type(model).__name__}. Write {name}(model, ...), not {name}(model.parameters(), ...)."
            )
        settings = resolve(self.method, {**given, **unknown})
        self._settings = settings
        self._ranks = ranks_of(model, settings.process_group)
        require_supported(name, model, self._ranks)
        self._own_damping = self.method.own_damping(settings.trace_floor, settings.beta)
        recipe = Recipe(
            factors=self.method.factors,
            rescaling=PRODUCT if settings.is_moving else self.method.rescaling,
            sharing=settings.sharing,
            factor_decay=settings.factor_decay,
            rescaling_decay=settings.rescaling_decay,
            decays_per_step=settings.decay_per == "step",
            averaging=settings.averaging,
            memory_budget=settings.memory_budget,
            basis_tolerance=settings.basis_tolerance,
            track_basis=settings.track_basis,
        )
        self._model_layers = ModelLayers(name, model, settings)
        self._recipe = recipe
        self._form = StepForm(
            power=settings.power,
            moving_decay=settings.rescaling_decay if settings.is_moving else None,
            entrywise=self.method.rescaling.measured,
            momentum_before=settings.momentum_at == "before",
            nesterov=settings.nesterov,
        )
        self._network = NetworkCurvature(self._layers, recipe, self._form, self._ranks)
        self._by_turns = None if settings.turns == AUTO else bool(settings.turns)
        self._least = None if settings.first_interval == AUTO else int(settings.first_interval)
        self._schedule = self._new_schedule()
        self._capture = Capture(
            model,
            self._model_layers.watched.values(),
            settings,
            ranks=self._ranks,
            grad_scaler=settings.grad_scaler,
            statistics_samples=settings.statistics_samples,
            may_be_summed=recipe.needs_only_gradients,
            squaring=recipe.squares if recipe.needs_only_moments else None,
            owner=name,
        )
        self._reported: set[str] = set()
        self._attempts: dict[str, int] = {}
        self._num_steps = self._skipped_steps = self._skipped_in_a_row = 0
        self._skipping = Skipping(next(iter(self._names)).device)
        self._is_sharded = any(map(is_sharded, self._names))
        self._rules: Mapping[str, DampingRule] = {}
        self._rules_of: list[Any] = []
        self._layer_groups: Mapping[str, Mapping[str, Any]] = {}
        self._highest_lr: list[float] = []
        self._refresh_seconds = 0.0
        self._refresh_log = RefreshLog()
        self._rejected_steps, self._reduction_ratio = 0, math.nan
        guard_settings, self._diverged = as_guard(settings.guard), False
        self._watch = None if guard_settings is None else Watch(guard_settings)
        self._is_made = False  # torch adds the first groups by the method that users add others with
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "damping": settings.damping,
            "first_order": False,
        }
        super().__init__(self._model_layers.param_groups(settings.first_order_lr), defaults)
        self._is_made = True
        self._first_order_ratio = 1.0 if settings.first_order_lr is None else settings.first_order_lr / lr
        self._require_whole_layers()
        self._damping_rules()
        require_same(self._ranks, name, self._facts())
        self._arm()

    @classmethod
    def natural(cls, model: nn.Module, **overrides: Any) -> Self:
        """The natural gradient proper, (F_hat + damping)^-1 g; keywords override single settings.

        With damping=LevenbergMarquardt() curvature is measured every five steps, unless that is overridden.
        """
        judged = isinstance(overrides.get("damping"), LevenbergMarquardt)
        return cls(model, **_overridden(natural_settings(cls.method, judged=judged), overrides))

    @classmethod
    def paper(cls, model: nn.Module, **overrides: Any) -> Self:
        """The optimizer with the paper's reading of every setting; keywords override single ones."""
        return cls(model, **_overridden(paper_settings(cls.method), overrides))

    # -- what is where ---------------------------------------------------------------------------------

    @property
    def _layers(self) -> dict[str, Layer]:
        return self._model_layers.layers

    @property
    def _names(self) -> dict[Tensor, str]:
        return self._model_layers.names

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for any torch optimizer.

        Layers that the model has got meanwhile, and whose parameters are in the group, are preconditioned from
        the next step that measures on. Parameters of no layer are first-order.
        """
        check_group({**self.defaults, **param_group})
        messages.unknown_keys(type(self).__name__, param_group, self.defaults)
        model = self._model_layers.model
        parameters = selected_parameters(model, param_group["params"], "add_param_group")
        before = sum(len(group["params"]) for group in self.param_groups)
        names = self._model_layers.present_names()
        if self._is_made and self._watch is not None:
            self._watch.forget()
        super().add_param_group(named({**param_group, "params": parameters}, names, before))
        for parameter in parameters:
            self.state[parameter]["step"] = 0
        if self._is_made:
            self._look_again()
            late = [p for p in parameters if p not in self._names]
            messages.late_parameters(type(self).__name__, len(late))

    def _look_again_if_frozen_or_unfrozen(self) -> None:
        if self._model_layers.was_frozen_or_unfrozen():
            self._look_again()

    def _look_again(self) -> None:
        """Look through the model again; layers that are what they were keep their curvature."""
        kept = self._model_layers.look_again(self.param_groups)
        if kept is None:
            return
        self._network.layers = self._layers
        if self._watch is not None:
            self._watch.forget()
        self._schedule = self._new_schedule()
        self._network.blocks = {n: block for n, block in self._network.blocks.items() if n in kept}
        self._refresh_log.keep(kept)
        self._require_whole_layers()
        self._damping_rules()
        waiting = [n for n, layer in self._layers.items() if layer.weight.requires_grad]
        self._attempts = {name: 0 for name in waiting if name not in self._network.blocks}
        self._capture.watch(self._model_layers.watched.values())
        self._arm()

    def _require_whole_layers(self) -> None:
        """A layer's weight and bias may differ in lr and weight decay, not in what precedes the direction."""
        groups = self._group_of()
        shared = ("damping", "momentum") if self._form.momentum_before else ("damping",)
        for group in self.param_groups:
            self._form.require_memory(group["momentum"])
        for layer in self._layers.values():
            for setting in shared:
                values = [groups[parameter][setting] for parameter in layer.parameters]
                if any(value != values[0] for value in values):
                    raise ValueError(
                        f"Weight and bias of layer {layer.name!r} are preconditioned together but their "
                        f"param groups have different {setting}: {values}. Give both the same."
                    )

    def _damping_rules(self) -> Mapping[str, DampingRule]:
        """Of every layer, known to be of use here; the same object while groups and layers are the same.

        Raises:
            ValueError: for a rule that cannot be used, in its own words.
        """
        given = [(id(g), g["damping"], list(map(id, g["params"]))) for g in self.param_groups]
        if given != self._rules_of or self._rules.keys() != self._layers.keys():
            groups = self._group_of()
            factor = 1.0 if self._watch is None else self._watch.losses.damping
            rules = {
                name: raised(as_rule(groups[layer.weight]["damping"], self._own_damping), factor)
                for name, layer in self._layers.items()
            }
            self._network.check_rules(rules)
            self._require_steps_to_judge()
            self._rules, self._rules_of = rules, given
            self._layer_groups = {name: groups[layer.weight] for name, layer in self._layers.items()}
        return self._rules

    def _require_steps_to_judge(self) -> None:
        """Raise ValueError where damping is LevenbergMarquardt() and the other settings do not go with it."""
        rules = [group["damping"] for group in self.param_groups]
        judging = [rule for rule in rules if isinstance(rule, LevenbergMarquardt)]
        if not judging:
            return
        settings, name = self._settings, type(self).__name__
        wrong = {
            "param groups with other damping": any(rule != judging[0] for rule in rules),
            "another step than the natural one": self._gathers or self._form.power != 1,
            "kl_clip": settings.kl_clip is not None,
            "guard": self._watch is not None,
            "grad_scaler": settings.grad_scaler is not None,
            "several processes": self._ranks.count > 1 or self._is_sharded,
            "weight_decay (add a penalty to the loss)": any(
                group["weight_decay"] for group in self.param_groups
            ),
        }
        found = [what for what, is_so in wrong.items() if is_so]
        if found:
            raise ValueError(
                f"damping=LevenbergMarquardt() does not go with {', '.join(found)}: it judges a natural step "
                f"by the loss. Expected {name}.natural(model, damping=LevenbergMarquardt()), without these."
            )

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
            closure: re-evaluates the model and returns the loss; called once, with gradients enabled. Where
                damping=LevenbergMarquardt() looks at the loss again, its forward pass is called again, too.

        Returns:
            The closure's loss, if there is one.
        """
        evaluation, loss = None, None
        if self._control() is not None:
            evaluation = self._evaluation(closure)
            loss = evaluation.returned
        elif closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._look_again_if_frozen_or_unfrozen()
        if self._watch is not None:
            self._step_on_watch(self._watch, loss)
        else:
            self._step_or_skip(loss if evaluation is None else evaluation.loss.detach(), evaluation)
        return loss

    def _step_or_skip(self, loss: object, evaluation: Evaluation | None) -> None:
        with without_autocast(next(iter(self._names)).device):
            problem = self._try_step(loss, evaluation)
        if problem is not None:
            self._skip(problem)

    def report_loss(self, loss: Tensor | float) -> None:
        """Tell the guard the loss of the next step, where step() gets no closure; without a guard it is free.

        Args:
            loss: of the whole batch, at the present parameters, as it was before it was scaled; of several
                micro-batches their mean or sum, always the same of the two. The last one counts.
        """
        if self._watch is not None:
            self._watch.reported = loss.detach() if isinstance(loss, Tensor) else loss

    def _step_on_watch(self, watch: Watch, loss: Any) -> None:
        """Take a step, or go back."""
        reported = watch.take_loss()
        seen = reported if loss is None else loss
        value = None if seen is None else as_number(seen)
        if watch.good is None:
            watch.keep(self._snapshot())
        if watch.judge(self._ranks.gather(value)):
            self._go_back(watch, f"the loss is {value} and was {watch.losses.mean:.4g} on average before")
            return
        self._step_or_skip(value, None)
        self._settle()
        watch.after_step(self._skipped_in_a_row)
        in_a_row = self._skipped_in_a_row
        if in_a_row and any(self._ranks.gather(self._diverged)):  # of which each may have parts
            self._go_back(watch, "parameters are no longer finite")
        elif in_a_row >= watch.settings.patience:
            self._go_back(watch, f"{in_a_row} steps in a row were skipped")
        elif not in_a_row and watch.wants_snapshot(self._num_steps):
            watch.keep(self._snapshot())

    def _snapshot(self) -> Snapshot:
        return Snapshot.of(self._model_layers.model, self._state_now(), self._num_steps)

    def _go_back(self, watch: Watch, why: str) -> None:
        """Go back to the last good snapshot, and take shorter steps from there.

        Raises:
            DivergenceError: if that was done as often as it may be.
        """
        snapshot, losses, num_steps = watch.good, watch.losses, self._num_steps
        assert snapshot is not None
        skipped, kept = self._skipped_steps, [{k: g[k] for k in OF_SCHEDULES} for g in self.param_groups]
        with Uninterrupted():
            snapshot.restore(self._model_layers.model)
            self.load_state_dict(snapshot.optimizer)
            for group, own in zip(self.param_groups, kept, strict=True):
                group.update(own)
            factors = losses.actions, losses.step, losses.damping
            watch.losses.actions, watch.losses.step, watch.losses.damping = factors
            watch.keep(snapshot)
            is_last = watch.losses.actions >= watch.settings.at_most
            if not is_last:
                watch.act()
            self._rules_of = []
            self._skipped_steps, self._skipped_in_a_row, self._diverged = skipped, 0, False
            self.zero_grad()
        name, now = type(self).__name__, watch.losses
        if is_last:
            raise DivergenceError(messages.given_up(name, why, num_steps, self._num_steps, now.actions))
        messages.went_back(name, why, num_steps, self._num_steps, now.step, now.damping, now.actions)

    @property
    def guard_actions(self) -> int:
        """How often the guard has gone back to a snapshot; 0 without one."""
        return 0 if self._watch is None else self._watch.losses.actions

    def _try_step(self, loss: object, evaluation: Evaluation | None) -> str | None:
        """Take the step, or say what keeps it from being taken, if that was not told yet.

        Raises:
            ValueError: for a learning rate that is no number, of which a schedule is to blame.
        """
        require_finite_rates(self.param_groups)
        together = self._ranks.count > 1
        is_known = isinstance(loss, Tensor | float) and not together  # where others may have another one
        if is_known and not bool(torch.isfinite(torch.as_tensor(loss)).all()):
            return f"the loss is {float(loss)}"  # type: ignore[arg-type]
        watched = together and self._capture.armed
        everywhere = self._ranks.gather(self._capture.problems) if watched else [self._capture.problems]
        if any(everywhere):
            return "; ".join(problem for problems in everywhere for problem in problems)
        rules = self._damping_rules()
        batches, before = self._capture.batches(), self._network.blocks
        measures = bool(batches or watched or self._due())
        if measures:
            require_still_alone(type(self).__name__, self._ranks, self._settings.process_group)
        self._check_replicas(measures=measures)
        waits = measures or not self._skipping.deferred or evaluation is not None
        raw = self._gradients()
        finite = None
        if self._gathers:  # which cannot be undone
            finite = self._everywhere(squares_are_finite(list(map(own_part, raw.values()))))
            if waits and finite is not None and not bool(finite):
                return in_words(raw, self._names, self._owners)
        # Factors, eigenbasis, re-scaling: new values, which replace the old ones only if all are finite.
        refreshed = before
        if measures:
            self._settle()
            due = self._due()
            start = time.perf_counter()
            try:
                refreshed = self._network.refreshed(batches, due)
            except NonFiniteStatisticsError as error:
                return str(error)
            finally:
                self._refresh_seconds += time.perf_counter() - start
        if evaluation is not None:  # whose closure is the user's
            return self._take(raw, rules, refreshed, finite, evaluation, waits=waits)
        with Uninterrupted():
            problem = self._take(raw, rules, refreshed, finite, None, waits=waits)
            if problem is not None:
                self._skip(problem)
        return None

    def _take(
        self,
        raw: Mapping[Tensor, Tensor],
        rules: Mapping[str, DampingRule],
        refreshed: dict[str, LayerCurvature],
        finite: Tensor | None,
        evaluation: Evaluation | None,
        *,
        waits: bool,
    ) -> str | None:
        """Precondition and move; what a step gathers and counts goes with it.

        Args:
            raw: the gradients.
            rules: of damping, by layer.
            refreshed: the blocks from now on.
            finite: whether all gradients are, on the device, where that is known.
            evaluation: of the closure, where steps are judged by the loss.
            waits: whether the host may wait for the device.

        Returns:
            What keeps the step from being taken; then nothing has changed.
        """
        before = self._network.blocks
        if refreshed is not before:
            self._network.blocks = refreshed
        # Precondition.
        try:
            with Phase("precondition"):
                natural, are_finite = self._natural(raw, rules, None if waits else finite)
                if not self._gathers:
                    others = [own_part(own) for p, own in raw.items() if p not in natural]
                    if evaluation is None:
                        share = longest_direction(self.param_groups, self._settings.stretch)
                        found = squares_are_finite([*are_finite, *others], share)
                    else:  # whose steps are as long as the loss allows
                        found = all_finite([*are_finite, *others])
                    finite = self._everywhere(found)
                elif any(own.dtype == torch.float16 for own in are_finite):  # whose range is small
                    both = all_finite(are_finite), finite
                    finite = torch.stack([own for own in both if own is not None]).all()
        except Exception:
            self._put_back(before)
            raise
        if waits and finite is not None and not bool(finite):
            self._put_back(before)
            return in_words({**raw, **natural}, self._names, self._owners)
        # Update.
        self._capture.clear()
        with Phase("update"):
            if evaluation is None:
                self._update(raw, natural, None if waits else finite)
            else:
                self._update_if_loss_falls(raw, natural, evaluation)
        self._network.release()
        if refreshed is not before:
            messages.failed_refreshes(type(self).__name__, before, refreshed)
            due = {n: own for n, own in self._due().items() if self._layers[n].weight.requires_grad}
            why = self._capture.why_nothing_came
            self._refresh_log.note(self._num_steps, due, before, refreshed, why)
        self._note_unseen()
        self._num_steps += 1
        self._skipped_in_a_row = 0
        self._arm()
        return None

    def _check_replicas(self, *, measures: bool) -> None:
        """Raise ReplicaError where processes have different parameters, now and then."""
        every = self._settings.replica_check_every
        is_first = measures and not self._network.blocks
        if self._ranks.count > 1 and (is_first or (every is not None and self._num_steps % every == 0)):
            values = values_of((name, own_part(parameter)) for parameter, name in self._names.items())
            require_same(self._ranks, type(self).__name__, of_all_parts(values, self._names))

    def _facts(self) -> dict[str, Any]:
        """What processes that train together must have in common, by name."""
        plain = (int, float, str, bool, type(None), torch.dtype, DampingRule)
        settings = {f"{name}=": getattr(self._settings, name) for name in NAMES}
        shapes = {f"parameter {n!r}": (list(p.shape), str(p.dtype)) for p, n in self._names.items()}
        groups = {
            f"param_groups[{place}][{key!r}]": value
            for place, group in enumerate(self.param_groups)
            for key, value in group.items()
        }
        facts = {"the optimizer": type(self).__name__, **shapes, **settings, **groups}
        return {name: value for name, value in facts.items() if isinstance(value, (*plain, tuple))}

    def _put_back(self, blocks: dict[str, LayerCurvature]) -> None:
        """Forget what a step has refreshed, unless something was gathered in the new bases already."""
        if not self._form.gathers:
            self._network.blocks = blocks

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and the statistics of the backward passes that made them."""
        self._capture.roll_back()
        if self._capture.asleep:  # which is in use, though there is a newer one
            self._arm()
        super().zero_grad(set_to_none)

    def _arm(self) -> None:
        """Watch the next forward pass if its step measures, or if a layer waits for its first statistics.

        A layer that was not seen in a few watched steps waits for the next step that measures anyway.
        """
        if self._num_steps and (self._by_turns is None or self._least is None):
            self._decide_on_schedule()
        waiting = any(attempts < MAX_ATTEMPTS for attempts in self._attempts.values())
        if waiting or not self._network.blocks:
            self._model_layers.report_strangers(self.param_groups)
            self._capture.arm(measurements=self._measurements())
            return
        measured = [name for name, due in self._due().items() if due.anything]
        if not measured:
            self._capture.disarm()
            return
        if self._schedule.turns[0][0] in measured:  # once in a round
            self._model_layers.report_strangers(self.param_groups)
        dormant = (name for name in self._model_layers.watched if name not in self._layers)
        self._capture.arm([*measured, *dormant], self._measurements())

    def _measurements(self) -> dict[str, float]:
        """As many as the running averages of each layer hold, as far as noise is concerned."""
        return {
            name: min(
                block.moments.measurements,
                math.inf if block.theta is None else block.theta.measurements,
            )
            for name, block in self._network.blocks.items()
        }

    def _due(self) -> dict[str, Due]:
        """What Algorithm 1 refreshes at the present step, by layer."""
        return self._schedule.due(self._num_steps)

    def _new_schedule(self) -> Schedule:
        settings = self._settings
        rescaling = settings.rescaling_every if self._recipe.rescaling.measured else None
        every, growth = (settings.factors_every, settings.basis_every, rescaling), settings.interval_growth
        intervals = Intervals(*every, growth, self._least or 1)
        return Schedule(intervals, self._layers, by_turns=self._by_turns or False)

    def _decide_on_schedule(self) -> None:
        """Let layers take turns where that is for nothing, and look at dear ones less; after the first step."""
        if self._by_turns is None:
            on_cpu = next(iter(self._names)).device.type == "cpu"
            is_free = self._capture.costs_no_pass and on_cpu and not self._capture.is_compiled
            self._by_turns = is_free and sum(map(cost_of_refresh, self._layers.values())) > WORTH_TURNS
        if self._least is None:
            everywhere = self._ranks.gather(self._capture.multiplications)
            if any(not parameter.requires_grad for parameter in self._model_layers.model.parameters()):
                self._least = 1  # what frozen layers do is not seen, and may be most of a step
            elif any(everywhere):
                self._least = first_interval(self._layers.values(), sum(everywhere) / len(everywhere))
        self._schedule = self._new_schedule()

    @property
    def _gathers(self) -> bool:
        """Whether a step changes averages of gradients, which must be known to be finite before."""
        return self._form.gathers or self._settings.first_order_step == "adamw"

    def _gradients(self) -> dict[Tensor, Tensor]:
        """Of every parameter that has one."""
        return {
            p: p.grad.to_dense() if p.grad.is_sparse else p.grad
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and p.requires_grad
        }

    def _natural(
        self, raw: Mapping[Tensor, Tensor], rules: Mapping[str, DampingRule], finite: Tensor | None
    ) -> tuple[dict[Tensor, Tensor], list[Tensor]]:
        """What the parameters of layers with a block move along: the preconditioned gradient, clipped.

        Returns:
            The directions, and tensors that are finite if and only if all of them are.
        """
        momenta = {name: group["momentum"] for name, group in self._layer_groups.items()}
        raw = self._whole_in_blocks(raw)
        natural, are_finite = self._network.directions(StepInputs(raw, rules, momenta, finite))
        clip = self._settings.kl_clip
        if clip is not None and natural:
            highest = self._highest_rates()
            stretch = self._settings.stretch
            terms = ((stretch * highest[p], raw[p], direction) for p, direction in natural.items())
            coefficient = kl_coefficient(terms, clip)
            natural = {p: direction * coefficient.to(direction.dtype) for p, direction in natural.items()}
            are_finite = list(natural.values())
        return {p: part_of(direction, p) for p, direction in natural.items()}, are_finite

    def _whole_in_blocks(self, raw: Mapping[Tensor, Tensor]) -> Mapping[Tensor, Tensor]:
        """The gradients, whole where they belong to a layer with a block."""
        if not self._is_sharded:
            return raw
        layers = (self._layers[name] for name in self._network.blocks)
        in_blocks = [p for layer in layers for p in layer.parameters if p in raw]
        return {**raw, **dict(zip(in_blocks, wholes([raw[p] for p in in_blocks]), strict=True))}

    @property
    def _owners(self) -> Ranks:
        """The processes that may know of different gradients, as each of them has parts."""
        return self._ranks if self._is_sharded else ALONE

    def _everywhere(self, finite: Tensor | None) -> Tensor | None:
        """Whether it is so in all processes, where each of them has seen its own parts only."""
        if not self._is_sharded:
            return finite
        missed = torch.zeros((), device=self._skipping.device) if finite is None else (~finite).float()
        return self._ranks.add([missed])[0] == 0

    def _highest_rates(self) -> dict[Tensor, float]:
        """Of every parameter, the highest learning rate so far: so that a clip leaves a schedule its effect."""
        rates = self._highest_lr + [0.0] * (len(self.param_groups) - len(self._highest_lr))
        self._highest_lr = [max(rate, g["lr"]) for rate, g in zip(rates, self.param_groups, strict=True)]
        pairs = zip(self._highest_lr, self.param_groups, strict=True)
        return {p: rate for rate, group in pairs for p in group["params"]}

    def _first_order(self, raw: Mapping[Tensor, Tensor], finite: Tensor | None) -> dict[Tensor, Tensor]:
        """What the other parameters move along: AdamW's step, or the raw gradient."""
        found = {p: own_part(gradient) for p, gradient in raw.items()}
        if raw and self._settings.first_order_step == "adamw":
            pairs = ((p, group["momentum"]) for group in self.param_groups for p in group["params"])
            found = adam_directions(raw, self.state, {p: beta for p, beta in pairs if p in raw}, finite)
        for parameter in self._unseen_parameters():
            if parameter in found:
                found[parameter] = found[parameter] * self._first_order_ratio
        return found

    def _unseen_parameters(self) -> list[Tensor]:
        """Parameters of layers without statistics, which move as if they had no block: by `first_order_lr`."""
        if len(self._network.blocks) == len(self._layers):
            return []
        unseen = (layer for name, layer in self._layers.items() if name not in self._network.blocks)
        return [parameter for layer in unseen for parameter in layer.parameters]

    def _update(
        self, raw: Mapping[Tensor, Tensor], natural: Mapping[Tensor, Tensor], finite: Tensor | None
    ) -> None:
        """Move the parameters; not at all where `finite`, on the device, is False."""
        if finite is not None:
            self._skipping.note(finite)
        others = self._first_order({p: own for p, own in raw.items() if p not in natural}, finite)
        settings, shorter = self._settings, 1.0 if self._watch is None else self._watch.losses.step
        ways = (
            (natural, settings.momentum_at == "after", settings.stretch),
            (others, settings.first_order_step == "sgd", 1.0),
        )
        for group in self.param_groups:
            for directions, has_velocity, stretch in ways:
                trained = [p for p in group["params"] if p in directions]
                for parameter in trained:
                    self.state[parameter]["step"] += 1
                momentum = group["momentum"] if has_velocity else 0.0
                apply_update(
                    [own_part(p) for p in trained],
                    [directions[p] for p in trained],
                    [own_part(self._velocity(p)) for p in trained] if momentum else [],
                    lr=group["lr"] * shorter,
                    momentum=momentum,
                    weight_decay=group["weight_decay"],
                    stretch=stretch,
                    finite=finite,
                )

    def _control(self) -> LevenbergMarquardt | None:
        """The rule by which steps are judged; None: they are not."""
        rule = self.param_groups[0]["damping"]
        return rule if isinstance(rule, LevenbergMarquardt) else None

    def _evaluation(self, closure: Callable[[], float] | None) -> Evaluation:
        """What the closure computes, kept for judging the step."""
        if closure is None:
            raise ValueError(
                "damping=LevenbergMarquardt() looks at the loss before and after a step. Expected "
                "step(closure), a function that zeroes gradients, computes the loss, calls its backward() and "
                "returns it."
            )
        return Evaluation.of(closure, self._model_layers.model, self._settings.outputs)

    def _update_if_loss_falls(
        self, raw: Mapping[Tensor, Tensor], natural: Mapping[Tensor, Tensor], evaluation: Evaluation
    ) -> None:
        """Move the parameters as a quadratic model of the loss says, and look what came of it."""
        control = self._control()
        assert control is not None
        known = {control: natural}
        if control.damping is None:
            control = replace(control, damping=max(control.least, self._network.mean_rescaling()))
        groups = self._group_of()

        def moves_under(rule: LevenbergMarquardt) -> list[Move]:
            self._damp_all_by(rule)
            found = known.get(rule) or self._natural(raw, self._damping_rules(), None)[0]
            ways = found, self._first_order({p: own for p, own in raw.items() if p not in found}, None)
            return [{p: -groups[p]["lr"] * own for p, own in way.items()} for way in ways if way]

        last = {p: -self._velocity(p) for p in raw if "momentum_buffer" in self.state[p]}
        if control.step == "lr":
            last = {p: groups[p]["momentum"] * own for p, own in last.items()}
        looks = self._num_steps % control.every == 0
        rule = control
        try:
            judged = judged_step(control, evaluation, moves_under, last, looks=looks)
            rule = judged.rule
        finally:
            self._damp_all_by(rule)
        self._rejected_steps += judged.rejected
        self._reduction_ratio = judged.ratio
        for parameter in raw:
            self.state[parameter]["step"] += 1
            if judged.move is None:
                self.state[parameter].pop("momentum_buffer", None)
            else:
                self._velocity(parameter).copy_(-judged.move[parameter])

    def _damp_all_by(self, rule: LevenbergMarquardt) -> None:
        for group in self.param_groups:
            group["damping"] = rule

    def _velocity(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]  # type: ignore[no-any-return]

    # -- what can go wrong in a step -------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Steps taken (k in Algorithm 1); skipped ones do not count. Not on the CPU, waits for the device."""
        self._settle()
        return self._num_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that were not taken because of non-finite numbers. Not on the CPU, waits for the device."""
        self._settle()
        return self._skipped_steps

    @property
    def rejected_steps(self) -> int:
        """Steps that damping=LevenbergMarquardt() has taken back, since they raised the loss."""
        return self._rejected_steps

    @property
    def reduction_ratio(self) -> float:
        """The change of the loss by the last step, as a share of what LevenbergMarquardt() had foretold.

        NaN where nobody looked, where no step was taken, and where rounding hides it.
        """
        return self._reduction_ratio

    def _settle(self) -> None:
        """Take back the counting of steps that, as the device knows, were not taken."""
        missed = self._skipping.read()
        if not missed:
            return
        for state in self.state.values():
            for count in ("step", "averaged"):
                if count in state:
                    state[count] = max(0, state[count] - missed)
        self._network.take_back(missed)
        self._num_steps -= missed
        self._skipped_steps += missed - 1
        self._tell_of_skipped(f"the gradients of {missed} steps since the last look were not finite")

    def _skip(self, problem: str) -> None:
        """Leave everything as it was before this step's forward pass."""
        self._capture.roll_back()
        self._tell_of_skipped(problem)

    def _tell_of_skipped(self, problem: str) -> None:
        self._skipped_steps += 1
        self._skipped_in_a_row += 1
        parameters = (p for group in self.param_groups for p in group["params"])
        self._diverged = not all(bool(torch.isfinite(own_part(p)).all()) for p in parameters)
        counts = self._num_steps, self._skipped_steps, self._skipped_in_a_row
        messages.skipped_step(type(self).__name__, *counts, problem, self._diverged)

    def _note_unseen(self) -> None:
        """Keep count of layers that have a gradient but no statistics, and say so once of each."""
        if not self._attempts and len(self._network.blocks) == len(self._layers):
            return
        watched = self._capture.armed
        unseen = []
        for name, layer in self._layers.items():
            has_gradient = layer.weight.grad is not None
            if name in self._network.blocks:
                self._attempts.pop(name, None)
            elif has_gradient or name in self._attempts:
                self._attempts.setdefault(name, 0)
                if watched:
                    self._attempts[name] += 1
                if watched and has_gradient:
                    unseen.append(name)
        new = [name for name in unseen if name not in self._reported | self._capture.left_out]
        if new:
            self._reported.update(new)
            messages.unseen_layers(type(self).__name__, new, self._capture.why_nothing_came)

    @property
    def curvature(self) -> BlockDiagonal[KroneckerBlock]:
        """The Fisher block of every layer seen so far, by layer name, as it is now (see tekfac.fisher).

        Moving second moments are those of gradients, not of the Fisher: with them the block's diagonal is the
        product of the factors' eigenvalues.
        """
        return self._network.block_diagonal()

    def signals(self) -> dict[str, LayerSignals]:
        """Trace, damping and condition of what divides gradients, by layer name: for logs and monitors."""
        return self._network.signals(self._damping_rules())

    def health(self, *, off_diagonals: bool = False) -> Health:
        """How the curvature of every layer is doing, and in one line what to change: print it.

        What it tells of refreshes is saved in the state, the reasons are those since the last start.

        Args:
            off_diagonals: whether to compute how far each basis is from diagonalising the present factors,
                which takes a product of matrices for each side.
        """
        trained = [name for name, layer in self._layers.items() if layer.weight.requires_grad]
        blocks = self._network.blocks.items() if off_diagonals else ()
        found = {name: off_diagonal(block, self._recipe) for name, block in blocks}
        steps = self.num_steps, self.skipped_steps
        return health_of(type(self).__name__, trained, self.signals(), self._refresh_log, found, *steps)

    @property
    def likelihoods(self) -> dict[str, Likelihood]:
        """What the model's predictions mean, by their names, as far as it is known: as was set, or as found.

        A single tensor has the name "". `tekfac.likelihoods.Unknown` stands for a loss that has none.
        """
        return self._capture.likelihoods.found

    @property
    def steps_since_refresh(self) -> int:
        """Steps taken since a refresh of the eigenbasis was last due: by turns, of the first turn's layers."""
        return self._schedule.steps_since_refresh(self._num_steps - 1) if self._num_steps else 0

    @property
    def curvature_seconds(self) -> float:
        """Time spent on curvature so far: in backward passes that were measured, and on refreshing.

        By the clock of the host; work that an accelerator has queued and not finished is not in it.
        """
        return self._capture.seconds + self._refresh_seconds

    @property
    def failed_refreshes(self) -> int:
        """How many refreshes of a layer failed for good, by eigendecompositions that did or for want of memory.

        An older basis was kept each time.
        """
        return sum(curvature.failed_refreshes for curvature in self._network.blocks.values())

    # -- state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later step depends on, in torch's own format (see optim/state.py).

        Plain dicts, lists, numbers, strings and tensors: torch.load(weights_only=True) reads it.
        """
        self._capture.drop_what_was_zeroed()
        return self._state_now()

    def _state_now(self) -> dict[str, Any]:
        """The same; passes since the last step are not in it, whether they were dropped or not."""
        whole = {
            "method": self.method.name,
            "num_steps": self.num_steps,
            "skipped_steps": self.skipped_steps,
            "rejected_steps": self._rejected_steps,
            "attempts": dict(self._attempts),
            "turns": self._by_turns,
            "first_interval": self._least,
            "highest_lr": list(self._highest_lr),
            "recipe": self._recipe_in_words(),
            "sampling": self._capture.sampling.state(),
            "choosing": self._capture.choosing.state(),
            "likelihoods": self._capture.likelihoods.state(),
            "probing": self._capture.probing.state(),
            "refreshes": self._refresh_log.plain(),
            "guard": None if self._watch is None else self._watch.state(),
        }
        blocks, motions = self._network.separate_blocks(), self._network.motions
        return to_torch(super().state_dict(), self.param_groups, self._layers, blocks, motions, whole)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the saved optimizer stopped, bit for bit.

        Raises:
            ValueError: if the state belongs to another method or another architecture, or is damaged; the
                message names what differs, or what is wrong by its place. Nothing is changed then.
        """
        self._look_again_if_frozen_or_unfrozen()
        saved = SavedState(state_dict, self._layers, self.param_groups)
        saved.require_method(self.method.name, self._recipe_in_words())
        saved.require_architecture()
        saved.require_sound()
        blocks, motions, averages, for_torch = (
            saved.blocks(),
            saved.motions(),
            saved.averages(),
            saved.for_torch(),
        )
        self._capture.sampling.load(saved.whole["sampling"])  # which fails if its device is not here
        with Uninterrupted():
            self._take_over(saved, blocks, motions, averages, for_torch)

    def _take_over(
        self,
        saved: SavedState,
        blocks: dict[str, LayerCurvature],
        motions: dict[str, LayerMotion],
        averages: Mapping[Tensor, dict[str, Tensor]],
        for_torch: dict[str, Any],
    ) -> None:
        """Put what was read of a state, all of which is known to be sound, in the place of what is here."""
        self._capture.choosing.load(saved.whole["choosing"])
        self._capture.likelihoods.load(saved.whole.get("likelihoods", "{}"))
        self._capture.probing.load(saved.whole.get("probing", "{}"))
        super().load_state_dict(for_torch)
        for parameter, own in averages.items():  # which torch has cast to the parameter's precision
            self.state[parameter].update(own)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter].setdefault("step", 0)  # of one that was frozen, and left out by some tools
        self._network.load(blocks, motions)
        self._skipping.read()
        self._num_steps = saved.whole["num_steps"]
        self._skipped_steps = saved.whole["skipped_steps"]
        self._rejected_steps = saved.whole.get("rejected_steps", 0)
        self._attempts = dict(saved.whole["attempts"])
        self._refresh_log = RefreshLog.from_plain(saved.whole.get("refreshes", {}))
        self._highest_lr = list(saved.whole["highest_lr"])
        if self._settings.turns == AUTO:
            self._by_turns = saved.whole["turns"]
        if self._settings.first_interval == AUTO:
            self._least = saved.whole.get("first_interval", 1)
        if self._watch is not None:
            self._watch.load(saved.whole.get("guard"))
            self._rules_of = []
        self._schedule = self._new_schedule()
        self._capture.clear()
        self._arm()

    def _recipe_in_words(self) -> dict[str, str]:
        """The settings that statistics must share to be averaged with one another."""
        return {
            name: getattr(self._settings, name)
            for name in ("sharing", "averaging", "rescaling", "momentum_at", "fisher", "loss_reduction")
        }

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} watches a live model and cannot be copied or pickled. Save its "
            "state_dict() and load that into an optimizer made for the other model."
        )


def _overridden(preset: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A preset with other values for some settings, without those that mean nothing then."""
    moves = overrides.get("rescaling") == "moving"
    return {**{k: v for k, v in preset.items() if not (moves and k == "rescaling_every")}, **overrides}
