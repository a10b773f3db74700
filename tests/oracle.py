"""A dense oracle for KFAC, EKFAC, TKFAC and TEKFAC, written from the definitions.

Everything is an explicit matrix or a loop; nothing here is meant to be fast. Use float64 models
and data. `B` samples, `G` groups, `T` positions; `d_in` counts the bias coordinate, the last.
Blocks `[d_out * d_in, d_out * d_in]` belong to one group, `a [B, T, d_in]` and `u [B, T, d_out]`,
and act on the row-major vectorisation of a gradient matrix `[d_out, d_in]`:
`rvec(u a^T) = kron(u, a)` and a factored block is `kron(outputs, inputs)`.
"""

from collections.abc import Callable
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
Loss = Callable[[Tensor, Tensor], Tensor]  # (output, target) of a batch of one -> its scalar loss
KfacSharing = Literal["expand", "reduce"]
Sharing = Literal["exact", "expand", "reduce"]


class Samples(NamedTuple):
    """What one layer sees and gives, sample by sample."""

    gradients: Tensor  # [B, G, d_out, d_in], matrices [weight | bias] by autograd
    a: Tensor  # [B, G, T, d_in], layer inputs
    u: Tensor  # [B, G, T, d_out], gradients of the layer's output


def per_sample(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, layer: str) -> Samples:
    """Loop over batches of one; u is the derivative by a zero added to the layer's output."""
    module = model.get_submodule(layer)
    assert isinstance(module, Layer)
    groups = 1 if isinstance(module, nn.Linear) else module.groups
    parameters = [p for p in (module.weight, module.bias) if isinstance(p, Tensor)]
    seen: list[tuple[Tensor, Tensor]] = []

    def shift_output(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append((args[0].detach(), torch.zeros_like(output, requires_grad=True)))
        return output + seen[-1][1]

    matrices, a, u = [], [], []
    with module.register_forward_hook(shift_output):
        for n in range(len(inputs)):
            value = loss(model(inputs[n : n + 1]), targets[n : n + 1])
            ((layer_input, shift),) = seen  # the layer is used exactly once
            seen.clear()
            *grads, du = torch.autograd.grad(value, [*parameters, shift])
            columns = [grad.reshape(groups, len(grad) // groups, -1) for grad in grads]
            matrices.append(torch.cat(columns, dim=-1))
            a.append(input_rows(module, layer_input))
            if not isinstance(module, nn.Linear):
                du = du.movedim(1, -1)  # channels last
            u.append(du.reshape(1, -1, groups, du.shape[-1] // groups).transpose(1, 2))
    return Samples(torch.stack(matrices), torch.cat(a), torch.cat(u))


def input_rows(module: Layer, x: Tensor) -> Tensor:
    """What a row of `[weight | bias]` is multiplied with at every position: [B, G, T, d_in]."""
    rows = x.reshape(len(x), 1, -1, x.shape[-1]) if isinstance(module, nn.Linear) else patches(module, x)
    return rows if module.bias is None else torch.cat([rows, torch.ones_like(rows[..., :1])], -1)


def patches(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """Im2col by two loops, over output positions and kernel offsets: [B, G, T, C / G * kernel]."""
    kernel, stride, dilation = conv.kernel_size, conv.stride, conv.dilation
    axes = range(len(kernel))
    reach = [dilation[i] * (kernel[i] - 1) for i in axes]
    margins = [(0, 0) for _ in axes]
    if conv.padding == "same":
        margins = [(r // 2, r - r // 2) for r in reach]
    elif conv.padding != "valid":
        margins = [(int(p), int(p)) for p in conv.padding]
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = pad(x, [side for margin in reversed(margins) for side in margin], mode=mode)
    sizes = [(x.shape[2 + i] - reach[i] - 1) // stride[i] + 1 for i in axes]
    rows = []
    for position in product(*map(range, sizes)):
        pixels = []
        for offset in product(*map(range, kernel)):
            pixel = x
            for i in axes:
                pixel = pixel.select(2, position[i] * stride[i] + offset[i] * dilation[i])
            pixels.append(pixel)  # [B, C]
        rows.append(torch.stack(pixels, dim=-1).reshape(len(x), conv.groups, -1))
    return torch.stack(rows, dim=2)


def softmax_column(k: int) -> Loss:
    """Label k with its probability: sqrt(p_k) held constant times -log p_k; classes come last."""

    def loss(logits: Tensor, _: Tensor) -> Tensor:
        log_p = logits.log_softmax(dim=-1).reshape(-1)[k]
        return -(log_p / 2).exp().detach() * log_p

    return loss


def gaussian_column(k: int) -> Loss:
    """Output k: all columns together give J^T J, the Fisher of N(f, I) and GGN of |f - y|^2 / 2."""
    return lambda output, _: output.reshape(-1)[k]


def per_column(column: Callable[[int], Loss], model: nn.Module, inputs: Tensor, layer: str) -> Samples:
    """K columns per sample as B * K samples, times sqrt(K): their mean is a sum over columns."""
    size = model(inputs[:1]).numel()
    columns = [per_sample(model, column(k), inputs, inputs, layer) for k in range(size)]
    gradients, a, u = (torch.cat(parts) for parts in zip(*columns, strict=True))
    return Samples(size**0.5 * gradients, a, size**0.5 * u)


class Factored(NamedTuple):
    """The block scale * outputs (x) inputs: (1, A, U) of KFAC, (sigma, Phi, Psi) of TKFAC."""

    scale: Tensor  # []
    inputs: Tensor  # [d_in, d_in]
    outputs: Tensor  # [d_out, d_out]

    def dense(self) -> Tensor:
        """The block itself: [d_out * d_in, d_out * d_in]."""
        return self.scale * torch.kron(self.outputs, self.inputs)

    def bases(self) -> tuple[Tensor, Tensor]:
        """Eigenvectors, in columns, of outputs [d_out, d_out] and of inputs [d_in, d_in]."""
        return torch.linalg.eigh(self.outputs)[1], torch.linalg.eigh(self.inputs)[1]


def gradient_matrices(a: Tensor, u: Tensor) -> Tensor:
    """Per-sample gradients, the sum over positions of u_t a_t^T: [B, d_out, d_in]."""
    samples, positions = range(a.shape[0]), range(a.shape[1])
    outer = [torch.stack([torch.outer(u[n, t], a[n, t]) for t in positions]) for n in samples]
    return torch.stack(outer).sum(1)


def mean_outer(vectors: Tensor) -> Tensor:
    """Mean over n of v_n v_n^T: [N, d] -> [d, d]."""
    return torch.stack([torch.outer(v, v) for v in vectors]).mean(0)


def exact_fisher(gradients: Tensor) -> Tensor:
    """Mean outer product of the vectorised gradients [B, d_out, d_in]."""
    return mean_outer(gradients.flatten(1))


def shared_fisher(a: Tensor, u: Tensor, sharing: Sharing = "exact") -> Tensor:
    """The block an option describes: of sum_t u_t a_t^T, of each position alone, of averages."""
    if sharing == "expand":  # a sum over positions of the Fisher of that position
        alone = [exact_fisher(gradient_matrices(a[:, [t]], u[:, [t]])) for t in range(a.shape[1])]
        return torch.stack(alone).sum(0)
    if sharing == "reduce":  # mean input, summed output gradient
        a, u = a.mean(1, keepdim=True), u.sum(1, keepdim=True)
    return exact_fisher(gradient_matrices(a, u))


def kfac_expand(a: Tensor, u: Tensor) -> Factored:
    """A: mean of a a^T over samples and positions. U: mean over samples, sum over positions."""
    outputs = mean_outer(u.flatten(0, 1)) * u.shape[1]
    return Factored(torch.ones_like(a[0, 0, 0]), mean_outer(a.flatten(0, 1)), outputs)


def kfac_reduce(a: Tensor, u: Tensor) -> Factored:
    """A: of the mean input of each sample. U: of the summed output gradient."""
    return Factored(torch.ones_like(a[0, 0, 0]), mean_outer(a.mean(1)), mean_outer(u.sum(1)))


def partial_traces(block: Tensor, d_out: int, d_in: int) -> tuple[Tensor, Tensor]:
    """Trace over the outputs, N_Phi [d_in, d_in], and over the inputs, N_Psi [d_out, d_out]."""
    view = block.reshape(d_out, d_in, d_out, d_in)
    n_phi = torch.stack([view[i, :, i, :] for i in range(d_out)]).sum(0)
    n_psi = torch.stack([view[:, j, :, j] for j in range(d_in)]).sum(0)
    return n_phi, n_psi


def tkfac(a: Tensor, u: Tensor, sharing: Sharing = "exact") -> Factored:
    """(sigma, Phi, Psi): trace and normalised partial traces of the block (uniform if zero)."""
    block, d_out, d_in = shared_fisher(a, u, sharing), u.shape[-1], a.shape[-1]
    sigma = block.trace()
    if sigma == 0:
        block = torch.eye(len(block)).to(block)
    n_phi, n_psi = partial_traces(block / block.trace(), d_out, d_in)
    return Factored(sigma, n_phi, n_psi)


def theta(block: Tensor, q_out: Tensor, q_in: Tensor) -> Tensor:
    """Diagonal of Q^T F Q with Q = q_out (x) q_in: [d_out, d_in]."""
    q = torch.kron(q_out, q_in)
    return (q.T @ block @ q).diagonal().reshape(len(q_out), len(q_in))


def eigen_corrected(block: Tensor, q_out: Tensor, q_in: Tensor) -> Tensor:
    """Q diag(Q^T F Q) Q^T, the nearest block to F that is diagonal in the basis."""
    q = torch.kron(q_out, q_in)
    return q @ torch.diag(theta(block, q_out, q_in).reshape(-1)) @ q.T


def ekfac(a: Tensor, u: Tensor, sharing: KfacSharing = "expand") -> Tensor:
    """The exact block corrected in KFAC's eigenbasis."""
    factors = {"expand": kfac_expand, "reduce": kfac_reduce}[sharing](a, u)
    return eigen_corrected(shared_fisher(a, u), *factors.bases())


def tekfac(a: Tensor, u: Tensor, sharing: Sharing = "exact") -> Tensor:
    """The exact block corrected in TKFAC's eigenbasis."""
    return eigen_corrected(shared_fisher(a, u), *tkfac(a, u, sharing).bases())


def damped_solve(block: Tensor, damping: float, gradient: Tensor) -> Tensor:
    """(F + damping I)^-1 rvec(gradient), as a matrix: [d_out, d_in]."""
    damped = block + damping * torch.eye(len(block)).to(block)
    solution: Tensor = torch.linalg.solve(damped, gradient.reshape(-1))
    return solution.reshape(gradient.shape)


def von_neumann_divergence(rho: Tensor, tau: Tensor) -> Tensor:
    """Trace of rho (log rho - log tau), for positive definite matrices of unit trace: []."""
    spectra = [torch.linalg.eigh(matrix) for matrix in (rho, tau)]
    log_rho, log_tau = (v @ torch.diag(values.log()) @ v.T for values, v in spectra)
    return torch.trace(rho @ (log_rho - log_tau))
