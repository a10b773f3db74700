"""Dense KFAC and EKFAC blocks as computed by curvlinops, in this project's conventions.

The blocks come from :class:`curvlinops.KFACLinearOperator` and
:class:`curvlinops.EKFACLinearOperator` through their public matrix product only: each operator is
applied to the identity, so nothing here depends on how curvlinops stores its factors.

Conventions of what is returned
-------------------------------
* One matrix per ``Linear`` / ``Conv2d`` layer, of shape ``[d_out * d_a, d_out * d_a]`` with
  ``d_a = d_in + 1`` for a layer with bias and ``d_a = d_in`` without
  (``d_in = C_in * kh * kw`` for a convolution).
* Row-major vectorisation of the gradient matrix ``[weight.reshape(d_out, -1) | bias]``: entry
  ``(i, j)`` has index ``i * d_a + j``. A Kronecker-factored block is therefore ``kron(U, A)``.
* Per-sample scaling. With ``l_n`` the loss function applied to sample ``n`` alone (a batch of
  one), the block approximates

  - ``fisher="empirical"``: ``(1/B) sum_n vec(G_n) vec(G_n)^T``, with ``G_n`` the gradient of
    ``l_n``;
  - ``fisher="type-2"``: ``(1/B) sum_n J_n^T H_n J_n``, with ``J_n`` the Jacobian of the model's
    output and ``H_n`` the Hessian of ``l_n`` in that output. For ``CrossEntropyLoss`` this is the
    Fisher matrix with the expectation over the model's labels taken exactly. For ``MSELoss``,
    ``H_n`` is ``2 I`` with ``reduction="sum"`` and ``(2 / C) I`` with ``reduction="mean"``.

Where curvlinops differs
------------------------
* With ``reduction="sum"`` it sums over the samples instead of averaging.
* With ``fisher_type="empirical"`` and ``reduction="mean"`` its loss terms are not quite the
  ``l_n``: it rescales ``MSELoss`` by ``sqrt(C)``, and it treats each of the ``R`` loss terms of a
  sample (positions of a sequence) as a sample of its own. Its block is then ``C`` (``MSELoss``)
  and ``R`` times the one above.

Both are undone here. Note further that the EKFAC block is unique only if the eigenvalues of the
Kronecker factors are simple, null spaces excepted, and that with ``sharing="reduce"`` even the
null spaces must be trivial: the positions that are averaged away can have gradients in them.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from curvlinops import EKFACLinearOperator, KFACLinearOperator
from torch import Tensor, nn

from comparable import Fisher, Loss, check_loss

Sharing = Literal["expand", "reduce"]


def kfac_blocks(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    *,
    fisher: Fisher,
    sharing: Sharing = "expand",
) -> dict[str, Tensor]:
    """Return the dense KFAC block ``kron(U, A)`` of every linear and convolutional layer.

    Args:
        model: Network in which every ``Linear`` and ``Conv2d`` is called once per forward pass.
            Not modified.
        inputs: Batch, ``[B, ...]``.
        targets: ``[B]`` classes for ``CrossEntropyLoss``, ``[B, C]`` values for ``MSELoss``; or
            ``[B, T]`` classes (outputs ``[B, C, T]``) and ``[B, T, C]`` values for models with a
            loss at every position. With ``fisher="type-2"`` the latter is only meaningful if no
            layer mixes positions: curvlinops back-propagates all the positions at once.
        loss: Loss function, with ``reduction`` ``"mean"`` or ``"sum"``.
        fisher: Empirical Fisher, or exact (type-2) Fisher / generalised Gauss-Newton.
        sharing: Treatment of layers that are shared over positions.

    Returns:
        Block of each layer by name, ``[d_out * d_a, d_out * d_a]``.

    Raises:
        ValueError: For a convolution with groups or with a padding other than zeros, and for
            losses with class weights, label smoothing or class probabilities as targets.
    """
    return _blocks(KFACLinearOperator, model, inputs, targets, loss, fisher, sharing)


def ekfac_blocks(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    *,
    fisher: Fisher,
    sharing: Sharing = "expand",
) -> dict[str, Tensor]:
    """Return the dense EKFAC block of every linear and convolutional layer.

    The block is ``Q diag(Theta) Q^T`` with ``Q = kron(Q_U, Q_A)`` the eigenvectors of the KFAC
    block and ``Theta`` the diagonal of ``Q^T F Q``. ``F`` is always the exact block of the
    layer; ``sharing`` only decides the factors that give ``Q``.

    Args:
        model: As for :func:`kfac_blocks`.
        inputs: As for :func:`kfac_blocks`.
        targets: ``[B]`` or ``[B, C]``.
        loss: As for :func:`kfac_blocks`.
        fisher: As for :func:`kfac_blocks`.
        sharing: As for :func:`kfac_blocks`.

    Returns:
        Block of each layer by name, ``[d_out * d_a, d_out * d_a]``.

    Raises:
        ValueError: As for :func:`kfac_blocks`, and for several loss terms per sample.
    """
    return _blocks(EKFACLinearOperator, model, inputs, targets, loss, fisher, sharing)


def _blocks(
    operator_class: type[KFACLinearOperator],
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    fisher: Fisher,
    sharing: Sharing,
) -> dict[str, Tensor]:
    """Build the operator over all layers and read one dense block per layer from it."""
    check_loss(loss, targets)
    layers = _supported_layers(model)
    parameters = [p for layer in layers.values() for p in layer.parameters()]
    operator = operator_class(
        model,
        loss,
        parameters,
        [(inputs, targets)],
        check_deterministic=False,
        fisher_type=fisher,
        kfac_approx=sharing,
        separate_weight_and_bias=False,
    )
    scale = _per_sample_scale(loss, fisher, targets)

    blocks: dict[str, Tensor] = {}
    position = 0
    for name, layer in layers.items():
        block = _dense_block(operator, parameters, position, layer)
        blocks[name] = scale * block
        position += len(list(layer.parameters()))
    return blocks


def _supported_layers(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return the layers with a block, by name, refusing those that curvlinops gets wrong."""
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)
    }
    for name, layer in layers.items():
        if isinstance(layer, nn.Conv2d) and (layer.groups != 1 or layer.padding_mode != "zeros"):
            msg = f"layer {name!r}: only groups=1 and padding_mode='zeros' are supported"
            raise ValueError(msg)
    return layers


def _per_sample_scale(loss: Loss, fisher: Fisher, targets: Tensor) -> float:
    """Return the factor from curvlinops' scaling to the per-sample scaling."""
    batch_size = targets.shape[0]
    if loss.reduction == "sum":
        return 1.0 / batch_size
    if fisher == "type-2":
        return 1.0
    # targets.numel() / batch_size is R for CrossEntropyLoss and R * C for MSELoss
    return batch_size / targets.numel()


def _dense_block(
    operator: KFACLinearOperator,
    parameters: Sequence[nn.Parameter],
    position: int,
    layer: nn.Linear | nn.Conv2d,
) -> Tensor:
    """Apply ``operator`` to the identity on one layer's parameters.

    Args:
        operator: Operator over all ``parameters``.
        parameters: Parameters of all the layers, in the operator's order.
        position: Index in ``parameters`` of the layer's weight; its bias, if any, follows.
        layer: The layer.

    Returns:
        Block in curvlinops' scaling, ``[d_out * d_a, d_out * d_a]``.
    """
    weight = layer.weight
    d_out, d_in = weight.shape[0], weight[0].numel()
    has_bias = layer.bias is not None
    d_a = d_in + has_bias
    size = d_out * d_a

    identity = torch.eye(size, dtype=weight.dtype, device=weight.device).reshape(d_out, d_a, size)
    columns = [p.new_zeros(*p.shape, size) for p in parameters]
    columns[position] = identity[:, :d_in].reshape(*weight.shape, size)
    if has_bias:
        columns[position + 1] = identity[:, d_in].clone()

    products = operator @ columns
    rows = [products[position].reshape(d_out, d_in, size)]
    if has_bias:
        rows.append(products[position + 1].reshape(d_out, 1, size))
    return torch.cat(rows, dim=1).reshape(size, size).detach()
