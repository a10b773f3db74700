"""Capture: what the layers of a model saw in forward and backward passes, ready to be measured.

When a backward pass arrives at the model's outputs (hooks.py), the vectors that make the Fisher (drawn labels,
exact columns, or the training gradient itself) are sent from there down to the noted calls. What arrives there
is kept, layer by layer, until the step reads it. The training gradient tells which targets are ignored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from tekfac.capture.autograd import send_down, sending
from tekfac.capture.hooks import WHY_NOTHING_CAME, Arrival, ModelHooks
from tekfac.capture.measurement import Measurement
from tekfac.capture.module_calls import ModuleCall, is_unclear, versions
from tekfac.capture.sample_axis import InseparableError, SampleAxis, divided_into, samples_first
from tekfac.capture.sampling import Sampling
from tekfac.layers.batch import LayerBatch, PassContext
from tekfac.layers.kinds.base import Application, RepetitionError
from tekfac.layers.layer import Layer
from tekfac.likelihoods import Prediction, as_likelihood

logger = logging.getLogger("tekfac")


class Capture:
    """Watches a model and delivers, for each layer, what its curvature is measured from.

    Attributes:
        problems: what kept a forward pass from being captured, in words.
        sampling: the generator of drawn labels.
        counted: which terms of the next backward pass count, [N, P], where that is known. Otherwise the
            gradient tells: a term without any does not count, unless its prediction is certain.
        passes: forward and backward passes received since the last `clear`.
        terms: their loss terms.
        samples: their samples, but for passes in which no term counts.
        seconds: what measuring in backward passes has taken so far, by the clock of the host.
        left_out: names of layers that were seen, but not in a way that can be measured.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[Layer],
        measurement: Measurement,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        only_training: bool = True,
    ) -> None:
        seed = torch.initial_seed() if measurement.seed is None else measurement.seed
        self.problems: list[str] = []
        self.sampling = Sampling(seed)
        self.counted: Tensor | None = None
        self.passes = self.terms = self.samples = 0
        self.seconds = 0.0
        self._measurement = measurement
        self._likelihood = as_likelihood(measurement.likelihood)
        self._grad_scaler = grad_scaler
        self._only_training = only_training
        self._hooks = ModelHooks(model, measurement, self, only_training=only_training)
        self._layers = {layer.name: layer for layer in layers}
        self._batches: dict[str, list[LayerBatch]] = {}
        self._loss_scale = 1.0
        self._adds_up = True
        self._probed: set[str] = set()
        self.left_out: set[str] = set()
        self._warned: set[str] = set()

    # -- when to watch ---------------------------------------------------------------------------------

    @property
    def armed(self) -> bool:
        """Whether forward passes are noted."""
        return self._hooks.armed

    def arm(self) -> None:
        """Note forward passes from now on."""
        self._hooks.arm(self._layers.values())

    def disarm(self) -> None:
        """Note no forward pass any more. What was captured stays."""
        self._hooks.disarm()

    def watch(self, layers: Iterable[Layer]) -> None:
        """Watch other layers from now on.

        What was captured of a layer stays where its parameters are still used by the same modules: it is a
        value that can be read as rows of the layer in its new form (without a bias that is frozen now, say).
        """
        self._layers = {layer.name: layer for layer in layers}
        batches = {name: own for name, own in self._batches.items() if name in self._layers}
        self._batches = {
            name: [replace(batch, layer=self._layers[name]) for batch in own]
            for name, own in batches.items()
            if own[0].layer.has_same_uses_as(self._layers[name])
        }
        if self.armed:
            self._hooks.rearm(self._layers.values())

    # -- what was captured -----------------------------------------------------------------------------

    @property
    def outputs(self) -> Tensor | None:
        """The predictions of the last forward pass; kept only where not only training is watched."""
        return self._hooks.outputs

    def batches(self) -> dict[str, list[LayerBatch]]:
        """What was captured since the last `clear`, by layer name, one entry per forward pass."""
        factor = self._gradient_factor()
        return {
            name: [replace(batch, gradient_factor=factor) for batch in own]
            for name, own in self._batches.items()
        }

    def _gradient_factor(self) -> float:
        """What captured gradients are multiplied by, to be those of single terms.

        Gradients of a mean loss are shares of the whole step's, whose terms are all known only now; those of
        drawn labels are whole ones.
        """
        is_share = self._measurement.fisher == "empirical" and self._measurement.loss_reduction != "sum"
        return (self.terms if is_share else 1) / self._loss_scale

    @property
    def why_nothing_came(self) -> str:
        """Why a layer has no statistics after a step that was to measure it, in words.

        Layers whose statistics were left out have reasons of their own, which the log has told.
        """
        return WHY_NOTHING_CAME[self._hooks.progress]

    def clear(self) -> None:
        """Let go of what was captured."""
        self._batches, self.problems = {}, []
        self.passes = self.terms = self.samples = 0
        self._hooks.outputs = None
        self._loss_scale = 1.0
        self._adds_up = True
        self.sampling.keep()

    def roll_back(self) -> None:
        """Let go of what was captured, as if its labels had never been drawn."""
        self.sampling.roll_back()
        self.clear()

    def drop_what_was_zeroed(self) -> None:
        """Roll back passes whose gradients are gone: model.zero_grad() was called and no step was taken."""
        if not (self._batches or self.problems) or not self._only_training or not self._adds_up:
            return
        gradients = (p.grad for layer in self._layers.values() for p in layer.parameters)
        if all(gradient is None or not bool(gradient.any()) for gradient in gradients):
            self.roll_back()

    # -- told by the hooks -----------------------------------------------------------------------------

    def pass_begins(self) -> None:
        """A forward pass that is watched begins."""
        self.drop_what_was_zeroed()

    def pass_arrived(self, arrival: Arrival) -> None:
        """Send the Fisher's vectors down from the outputs and keep what arrives at the layers."""
        start = time.perf_counter()
        self._adds_up &= arrival.adds_up is not None
        outputs, gradient = arrival.outputs, arrival.gradient
        unusable = outputs.isnan() | (outputs == torch.inf)  # a class masked by -inf is fine
        if bool(unusable.any()) or not bool(torch.isfinite(gradient).all()):
            self.problems.append("the model's outputs or their gradients are not finite")
        else:
            self._receive(arrival)
        self.seconds += time.perf_counter() - start

    def _receive(self, arrival: Arrival) -> None:
        batch_dim, fisher = self._measurement.batch_dim, self._measurement.fisher
        outputs = arrival.outputs.movedim(batch_dim, 0)
        gradient = arrival.gradient.movedim(batch_dim, 0)
        prediction = self._likelihood.predict(outputs, gradient)
        if self.counted is not None:
            prediction = replace(prediction, counted=self.counted)
        if prediction.doubt is not None:
            self._warn_once(prediction.doubt)
        num_terms = self._num_terms(prediction)
        self.passes += 1
        self.terms += num_terms
        self.samples += len(outputs) if num_terms else 0
        if fisher == "empirical" and self._grad_scaler is not None:
            self._loss_scale = self._grad_scaler.get_scale()
        calls = arrival.calls
        if not calls and fisher == "sampled" and num_terms:
            prediction.sample(self.sampling.generator_on(outputs.device))  # later draws are as with more layers
        if not num_terms or not calls:
            return
        self._warn_of_other_samples(calls, outputs)
        # The last sample, since in a causal model with samples and positions mixed up it reaches most rows.
        probed = int(prediction.counted.any(dim=1).nonzero()[-1])
        vectors = self._vectors(prediction, gradient, outputs.device)
        self._send(arrival, vectors, probed if self._samples_are_unclear(calls, outputs) else None)
        self._keep(
            calls,
            SampleAxis(len(outputs), probed, may_be_joined=fisher == "sampled"),
            PassContext.of(num_terms, prediction.counted, arrival.real),
        )

    def _num_terms(self, prediction: Prediction) -> int:
        """M, the number of summands that the Fisher is divided by."""
        if self._measurement.loss_reduction == "mean":
            return int(prediction.counted.sum())
        return int(prediction.counted.any(dim=1).sum())

    def _vectors(self, prediction: Prediction, gradient: Tensor, device: torch.device) -> Iterator[Tensor]:
        """The vectors, shaped like the outputs, that are back-propagated one by one."""
        if self._measurement.fisher == "sampled":
            yield prediction.sample(self.sampling.generator_on(device))
        elif self._measurement.fisher == "exact":
            yield from prediction.columns()
        else:
            yield gradient

    def _send(self, arrival: Arrival, vectors: Iterable[Tensor], probed: int | None) -> None:
        """Send vectors down to the calls, and then the probe: the gradient of one sample alone."""
        calls = [noted.call for noted in arrival.calls]
        batch_dim = self._measurement.batch_dim
        with sending():
            for vector in vectors:
                arrived = send_down(arrival.edge, vector.movedim(0, batch_dim), calls)
                for call, own in zip(calls, arrived, strict=True):
                    if any(part is not None for part in own):
                        call.gradients.append(own)
            if probed is not None:
                probe = torch.zeros_like(arrival.gradient)
                probe.movedim(batch_dim, 0)[probed] = arrival.gradient.movedim(batch_dim, 0)[probed]
                for call, own in zip(calls, send_down(arrival.edge, probe, calls), strict=True):
                    call.probe = own

    # -- from calls to batches -------------------------------------------------------------------------

    def _keep(self, calls: Sequence[ModuleCall], axis: SampleAxis, context: PassContext) -> None:
        """Join the applications of each layer's parameters to a batch."""
        by_layer: dict[str, list[Application]] = {}
        layers: dict[str, Layer] = {}
        for noted in calls:
            for application in self._applications(noted):
                layer = noted.watched.layers.get(application.part)
                if layer is None or not layer.weight.requires_grad:
                    continue
                if not application.gradients or not application.inputs.numel():  # an expert that got no token
                    continue
                layers[layer.name] = layer
                by_layer.setdefault(layer.name, []).append(samples_first(application, axis))
        for name, applications in by_layer.items():
            try:
                samples, doubt = divided_into(name, applications, axis)
            except InseparableError as error:
                self._leave_out([name], str(error))
                continue
            if doubt is not None:
                self._warn_once(doubt)
            self._probed.add(name)
            batch = LayerBatch(layers[name], tuple(applications), samples, context)
            self._batches.setdefault(name, []).append(batch)

    def _applications(self, noted: ModuleCall) -> list[Application]:
        """What a call did with the module's parameters; none, and a word in the log, if that cannot be told."""
        watched, call = noted.watched, noted.call
        names = [layer.name for layer in watched.layers.values()]
        if versions(call.kept) != call.versions:
            self._leave_out(
                names,
                f"the input of layer {watched.name!r} was changed in place after the layer was called (inside "
                "a checkpointed segment?)",
            )
            return []
        if not call.gradients:
            return []
        try:
            return watched.kind.applications(watched.module, call)
        except RepetitionError as error:
            self._leave_out(names, str(error))
            return []

    def _samples_are_unclear(self, calls: Sequence[ModuleCall], outputs: Tensor) -> bool:
        """Whether shapes leave open which rows are whose.

        So they do where a layer was called more than once or its input can be arranged in several ways and,
        for a layer seen for the first time, where the outputs have more than one axis beside the classes.
        """
        names = [layer.name for noted in calls for layer in noted.watched.layers.values()]
        if len(set(names)) < len(names) or (outputs.ndim > 2 and not self._probed.issuperset(names)):
            return True
        return any(is_unclear(noted, len(outputs)) for noted in calls)

    def _warn_of_other_samples(self, calls: Sequence[ModuleCall], outputs: Tensor) -> None:
        """Say once if a module that knows its samples got as many as another axis of the outputs has."""
        for noted in calls:
            watched = noted.watched
            known = watched.kind.num_samples(watched.module, noted.call.kept)
            if known is not None and known != len(outputs) and known in outputs.shape[1:]:
                self._warn_once(
                    f"layer {watched.name!r} was called with {known} samples, but the axis of the model's "
                    f"outputs that is taken for the samples has {len(outputs)}. If another one holds them "
                    "(sequence-first outputs), say which: batch_dim=1"
                )

    # -- words -----------------------------------------------------------------------------------------

    def _leave_out(self, layers: Sequence[str], why: str) -> None:
        """Note that layers have no statistics, and say once why."""
        self.left_out.update(layers)
        instead = ", which is trained by its raw gradient," if self._only_training else ""
        self._warn_once(f"the statistics of layer {layers[0]!r}{instead} are left out: {why}")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message[0].upper() + message[1:] + ("" if message.endswith("?") else "."))
