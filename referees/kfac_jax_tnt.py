"""Dense TNT (that is, TKFAC) blocks as computed by kfac-jax, in this project's conventions.

A torch ``nn.Sequential`` is rewritten as a JAX function with the same parameters, on which
kfac-jax's own machinery runs unaided: its graph matcher finds the layers, its
:class:`kfac_jax.BlockDiagonalCurvature` estimator back-propagates, and its
:class:`kfac_jax.DenseTNT` and :class:`kfac_jax.Conv2DTNT` blocks accumulate the factors. Each
block is then multiplied onto the identity.

For ``Linear``, ``DenseTNT`` is TKFAC: ``sigma * kron(Psi, Phi)`` with

    sigma = (1/B) sum |a|^2 |u|^2,
    Phi = (1/B) sum |u|^2 a a^T / sigma,    Psi = (1/B) sum |a|^2 u u^T / sigma.

For ``Conv2d``, ``Conv2DTNT`` with ``weighting_per_location=True`` is TKFAC-expand: the same
with the sums also over the positions of each sample, still divided by ``B`` only.

Conventions of what is returned
-------------------------------
* One float64 matrix per layer, ``[d_out * d_a, d_out * d_a]``, over the row-major vectorisation of
  ``[weight.reshape(d_out, -1) | bias]`` in torch's layout: ``d_a = d_in + 1`` with bias, else
  ``d_in``, with ``d_in = C_in * kh * kw`` for a convolution.
* Per-sample scaling: ``u`` is the gradient of ``l_n``, the loss of sample ``n`` alone. With
  ``fisher="type-2"`` the sums run also over the columns of a square root of the Hessian of
  ``l_n`` in the output, whose trace-restricted factors are the label expectation of the above.

Where kfac-jax differs
----------------------
* Its mode ``"fisher_empirical"`` divides by the batch size once more; that is undone here.
* Its squared error does not average over the output's coordinates; the weight ``1 / C`` of
  ``nn.MSELoss(reduction="mean")`` is passed on.
* It computes convolutions channels-last; the layouts are converted here.
* Its input statistics do not know of the dilation of a convolution, so dilation is refused; and
  it has no TNT block for ``Linear`` on sequences, so inputs of ``Linear`` must be 2-D.

Importing this module turns on JAX's 64-bit mode for the whole process.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import kfac_jax
import numpy as np
import torch
from jax import Array
from torch import Tensor, nn

from comparable import Fisher, Loss, check_loss

jax.config.update("jax_enable_x64", True)

LayerParameters = tuple[Array, ...]

_ESTIMATION_MODES = {"empirical": "fisher_empirical", "type-2": "fisher_exact"}

_ACTIVATIONS: dict[type[nn.Module], Callable[[Array], Array]] = {
    nn.Identity: lambda x: x,
    nn.ReLU: jax.nn.relu,
    nn.Sigmoid: jax.nn.sigmoid,
    nn.Softplus: jax.nn.softplus,
    nn.Tanh: jnp.tanh,
}


def tnt_blocks(
    model: nn.Sequential,
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    *,
    fisher: Fisher,
    weighting_per_location: bool = True,
) -> dict[str, Tensor]:
    """Return kfac-jax's dense TNT block of every linear and convolutional layer.

    Args:
        model: Flat sequence of ``Linear``, ``Conv2d`` (``groups=1``, ``dilation=1``, zero
            padding), ``Flatten``, ``AdaptiveAvgPool2d(1)`` and simple activations. Evaluated in
            float64 whatever its dtype. Not modified.
        inputs: Batch, ``[B, d]`` or ``[B, C, H, W]``.
        targets: ``[B]`` classes for ``CrossEntropyLoss``; values of the shape of the output for
            ``MSELoss``.
        loss: Loss function, with ``reduction`` ``"mean"`` or ``"sum"``.
        fisher: Empirical Fisher, or exact (type-2) Fisher / generalised Gauss-Newton.
        weighting_per_location: ``True`` for TKFAC-expand of convolutions; ``False`` for
            kfac-jax's other choice, which weighs by the norms summed over the positions of a
            sample.

    Returns:
        Block of each layer by name, ``[d_out * d_a, d_out * d_a]``, float64.

    Raises:
        NotImplementedError: For a module that is not in the list above.
        ValueError: For losses with class weights, label smoothing or class probabilities as
            targets.
    """
    check_loss(loss, targets)
    layers = {
        name: module for name, module in model.named_children() if isinstance(module, nn.Linear | nn.Conv2d)
    }
    parameters = [_to_jax_parameters(layer) for layer in layers.values()]
    batch = (_to_jax(inputs), _to_jax(targets))
    batch_size = inputs.shape[0]

    estimator = kfac_jax.BlockDiagonalCurvature(
        func=partial(_registered_loss, model, loss),
        default_estimation_mode=_ESTIMATION_MODES[fisher],
        layer_tag_to_block_ctor={
            "dense": kfac_jax.DenseTNT,
            "conv2d": partial(kfac_jax.Conv2DTNT, weighting_per_location=weighting_per_location),
        },
    )
    key = jax.random.PRNGKey(0)  # required by the interface; neither mode draws anything
    state = estimator.init(key, (parameters, batch), None, None)
    state = estimator.update_curvature_matrix_estimate(
        state=state,
        ema_old=0.0,
        ema_new=1.0,
        identity_weight=0.0,
        batch_size=batch_size,
        rng=key,
        func_args=(parameters, batch),
    )
    scale = float(batch_size) if fisher == "empirical" else 1.0

    blocks: dict[str, Tensor] = {}
    for (name, layer), indices in zip(layers.items(), estimator.params_block_index, strict=True):
        index = indices[0]  # the block of the weight, shared by the bias
        block = _dense_block(layer, estimator.blocks[index], state.blocks_states[index])
        blocks[name] = scale * block
    return blocks


def tnt_block_of_pairs(activations: Tensor, output_gradients: Tensor, *, bias: bool = True) -> Tensor:
    """Return kfac-jax's dense TNT block of a linear layer for given ``(a, u)`` pairs.

    The pairs are realised by a zero layer with a squared error loss, whose gradient in the
    output is ``-2 * target``.

    Args:
        activations: Inputs of the layer without the constant coordinate, ``[B, d_in]``.
        output_gradients: Per-sample gradients in the layer's output, ``[B, d_out]``.
        bias: Whether the layer has a bias.

    Returns:
        ``sigma * kron(Psi, Phi)``, ``[d_out * d_a, d_out * d_a]``, float64.
    """
    layer = nn.Linear(activations.shape[1], output_gradients.shape[1], bias=bias)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    blocks = tnt_blocks(
        nn.Sequential(layer),
        activations,
        -output_gradients / 2,
        nn.MSELoss(reduction="sum"),
        fisher="empirical",
    )
    return blocks["0"]


def _to_jax(tensor: Tensor) -> Array:
    """Convert a tensor, promoting floating-point values to float64."""
    values = tensor.detach().double() if tensor.is_floating_point() else tensor.detach()
    return jnp.asarray(values.cpu().numpy())


def _weight_to_jax(weight: Array | np.ndarray) -> Array:
    """Convert a weight from torch's layout to JAX's.

    ``[d_out, d_in]`` becomes ``[d_in, d_out]``; ``[C_out, C_in, kh, kw]`` becomes
    ``[kh, kw, C_in, C_out]``.
    """
    return jnp.transpose(weight, (1, 0) if weight.ndim == 2 else (2, 3, 1, 0))


def _weight_from_jax(weight: Array) -> Array:
    """Invert :func:`_weight_to_jax`."""
    return jnp.transpose(weight, (1, 0) if weight.ndim == 2 else (3, 2, 0, 1))


def _to_jax_parameters(layer: nn.Linear | nn.Conv2d) -> LayerParameters:
    """Return the layer's ``(weight,)`` or ``(weight, bias)`` in JAX's layout."""
    weight = _weight_to_jax(_to_jax(layer.weight))
    return (weight,) if layer.bias is None else (weight, _to_jax(layer.bias))


def _registered_loss(
    model: nn.Sequential,
    loss: Loss,
    parameters: Sequence[LayerParameters],
    batch: tuple[Array, Array],
) -> Array:
    """Evaluate the model, register the loss with kfac-jax, and return a scalar.

    Only the registered loss matters to the estimator; the scalar that is returned does not.
    """
    inputs, targets = batch
    outputs = _forward(model, parameters, inputs)
    if isinstance(loss, nn.CrossEntropyLoss):
        kfac_jax.register_softmax_cross_entropy_loss(outputs, targets)
    else:
        weight = outputs.shape[0] / outputs.size if loss.reduction == "mean" else 1.0
        kfac_jax.register_squared_error_loss(outputs, targets, weight=weight)
    return jnp.sum(outputs)


def _forward(model: nn.Sequential, parameters: Sequence[LayerParameters], inputs: Array) -> Array:
    """Evaluate the torch model in JAX, keeping torch's channels-first layout between layers."""
    values = inputs
    remaining = iter(parameters)
    for module in model:
        if isinstance(module, nn.Linear):
            values = _linear(values, *next(remaining))
        elif isinstance(module, nn.Conv2d):
            values = _conv2d(module, values, *next(remaining))
        elif isinstance(module, nn.Flatten):
            values = values.reshape(values.shape[0], -1)
        elif isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1)):
            values = values.mean(axis=(2, 3), keepdims=True)
        elif type(module) in _ACTIVATIONS:
            values = _ACTIVATIONS[type(module)](values)
        else:
            msg = f"no JAX counterpart of {module}"
            raise NotImplementedError(msg)
    return values


def _linear(values: Array, weight: Array, bias: Array | None = None) -> Array:
    """Apply a linear layer to ``[B, d_in]``."""
    if values.ndim != 2:
        msg = f"kfac-jax has no TNT block for Linear on inputs of shape {values.shape}"
        raise NotImplementedError(msg)
    outputs = values @ weight
    return outputs if bias is None else outputs + bias


def _conv2d(module: nn.Conv2d, values: Array, weight: Array, bias: Array | None = None) -> Array:
    """Apply a convolution to ``[B, C_in, H, W]``, computed channels-last."""
    simple = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
    if not simple or isinstance(module.padding, str):
        msg = f"kfac-jax's statistics do not cover {module}"
        raise NotImplementedError(msg)
    outputs = jax.lax.conv_general_dilated(
        jnp.transpose(values, (0, 2, 3, 1)),
        weight,
        window_strides=module.stride,
        padding=[(p, p) for p in module.padding],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    outputs = outputs if bias is None else outputs + bias
    return jnp.transpose(outputs, (0, 3, 1, 2))


def _dense_block(
    layer: nn.Linear | nn.Conv2d,
    block: kfac_jax.CurvatureBlock,
    state: kfac_jax.CurvatureBlock.State,
) -> Tensor:
    """Multiply a block onto every unit gradient, ``[d_out * d_a, d_out * d_a]``."""
    expected = tuple(tuple(p.shape) for p in _to_jax_parameters(layer))
    is_tnt = isinstance(block, kfac_jax.DenseTNT | kfac_jax.Conv2DTNT)
    if not is_tnt or block.parameters_shapes != expected:
        msg = f"kfac-jax took {layer} for {block}"
        raise RuntimeError(msg)
    weight_shape = tuple(layer.weight.shape)
    d_out, d_in = weight_shape[0], layer.weight[0].numel()
    d_a = d_in + (layer.bias is not None)

    def multiply(gradient: Array) -> Array:
        """Map a gradient ``[d_out * d_a]`` to the block times it."""
        matrix = gradient.reshape(d_out, d_a)
        vector = [_weight_to_jax(matrix[:, :d_in].reshape(weight_shape))]
        if layer.bias is not None:
            vector.append(matrix[:, d_in])
        product = block.multiply(state, vector, identity_weight=0.0, exact_power=True, use_cached=False)
        columns = [_weight_from_jax(product[0]).reshape(d_out, d_in)]
        columns.extend(bias.reshape(d_out, 1) for bias in product[1:])
        return jnp.concatenate(columns, axis=1).reshape(-1)

    # row k of the vmapped result is the block times unit vector k, i.e. column k
    columns = jax.vmap(multiply)(jnp.eye(d_out * d_a))
    return torch.from_numpy(np.array(columns.T))
