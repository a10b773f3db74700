"""The dense oracle checked against itself: identities that need no optimizer.

Numbers in the test names are those of docs/oracles.md.
Everything is float64; two tensors agree if the largest difference is below 1e-10 of the largest
entry.
"""

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy, unfold

import oracle
from oracle import Factored, Layer, Sharing

RTOL = 1e-10
SHARINGS: tuple[Sharing, ...] = ("exact", "expand", "reduce")


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-300))


def close(actual: Tensor | float, expected: Tensor | float) -> None:
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    assert actual.shape == expected.shape
    assert error(actual, expected) < RTOL, f"relative error {error(actual, expected):.2e}"


def rows(b: int = 9, t: int = 1, d_in: int = 4, d_out: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients whose norms are correlated, so that no identity is luck."""
    a = torch.randn(b, t, d_in) @ torch.randn(d_in, d_in) + 0.3
    a[..., -1] = 1.0
    u = torch.randn(b, t, d_out) @ torch.randn(d_out, d_out)
    return a, u * a.norm(dim=-1, keepdim=True)


def orthogonal(d: int) -> Tensor:
    return torch.linalg.qr(torch.randn(d, d))[0]


def four_methods(a: Tensor, u: Tensor) -> dict[str, Tensor]:
    return {
        "kfac": oracle.kfac_expand(a, u).dense(),
        "ekfac": oracle.ekfac(a, u),
        "tkfac": oracle.tkfac(a, u).dense(),
        "tekfac": oracle.tekfac(a, u),
    }


def factors_of_every_option(a: Tensor, u: Tensor) -> dict[str, Factored]:
    return {
        "kfac-expand": oracle.kfac_expand(a, u),
        "kfac-reduce": oracle.kfac_reduce(a, u),
        **{f"tkfac-{s}": oracle.tkfac(a, u, s) for s in SHARINGS},
    }


def expand_trace(a: Tensor, u: Tensor) -> Tensor:
    return (a.square().sum(-1) * u.square().sum(-1)).sum(1).mean()


# ------------------------------------------------------------------------- algebra and plumbing


def test_01_kronecker_conventions() -> None:
    a, u, x = torch.randn(4, 4), torch.randn(3, 3), torch.randn(3, 4)
    close(torch.kron(u, a) @ x.reshape(-1), (u @ x @ a.T).reshape(-1))
    close(torch.kron(a, u) @ x.T.reshape(-1), (u @ x @ a.T).T.reshape(-1))
    v, w = torch.randn(3), torch.randn(4)
    close(torch.outer(v, w).reshape(-1), torch.kron(v, w))
    close(torch.outer(v, w).T.reshape(-1), torch.kron(w, v))
    g, lam = torch.randn(3, 4), 0.1
    a, u = a @ a.T, u @ u.T
    by_columns = oracle.damped_solve(torch.kron(a, u), lam, g.T.contiguous()).T
    close(oracle.damped_solve(torch.kron(u, a), lam, g), by_columns)


class Positions(nn.Module):
    """A layer between two others; in-place activation; keeps or pools positions."""

    def __init__(self, layer: nn.Module, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = first, layer, last
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.relu(self.layer(torch.tanh(self.first(x)))))


LAYERS: dict[str, Callable[[], tuple[Layer, tuple[int, ...]]]] = {
    "plain": lambda: (nn.Conv2d(2, 3, 3), (2, 5, 6)),
    "stride": lambda: (nn.Conv2d(2, 3, 3, stride=(2, 1), padding=(1, 2)), (2, 6, 5)),
    "dilation": lambda: (nn.Conv2d(2, 3, (2, 3), dilation=(2, 1), padding=1), (2, 6, 5)),
    "all": lambda: (nn.Conv2d(4, 6, 3, 2, 2, (2, 1), groups=2), (4, 7, 8)),
    "no bias": lambda: (nn.Conv2d(2, 3, (3, 2), bias=False), (2, 5, 6)),
    "depthwise": lambda: (nn.Conv2d(3, 3, 2, groups=3, bias=False), (3, 4, 4)),
    "same": lambda: (nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)), (2, 6, 5)),
    "valid": lambda: (nn.Conv2d(2, 3, 2, padding="valid"), (2, 4, 4)),
    "circular": lambda: (nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"), (2, 5, 5)),
    "reflect": lambda: (nn.Conv2d(2, 3, 3, 2, (2, 1), padding_mode="reflect"), (2, 5, 5)),
    "replicate": lambda: (nn.Conv2d(2, 3, 3, padding="same", padding_mode="replicate"), (2, 4, 5)),
    "same even circular": lambda: (
        nn.Conv2d(2, 2, (2, 4), padding="same", padding_mode="circular"),
        (2, 5, 5),
    ),
    "1d": lambda: (nn.Conv1d(4, 6, 3, 2, 1, 2, groups=2), (4, 9)),
    "1d same reflect": lambda: (nn.Conv1d(2, 3, 4, padding="same", padding_mode="reflect"), (2, 7)),
    "3d": lambda: (nn.Conv3d(2, 4, (2, 1, 3), (1, 2, 1), (1, 0, 1), groups=2), (2, 3, 4, 3)),
    "3d replicate": lambda: (
        nn.Conv3d(1, 2, 2, padding=(0, 1, 2), padding_mode="replicate", bias=False),
        (1, 2, 3, 2),
    ),
    "linear": lambda: (nn.Linear(4, 3), (4,)),
    "linear no bias": lambda: (nn.Linear(4, 3, bias=False), (4,)),
    "sequence": lambda: (nn.Linear(4, 3), (5, 4)),
    "two sequence axes": lambda: (nn.Linear(4, 3, bias=False), (2, 3, 4)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_02_captured_rows_give_the_gradient(name: str) -> None:
    layer, shape = LAYERS[name]()
    outputs = layer(torch.randn(1, *shape)).numel()
    first = nn.Linear(shape[-1], shape[-1])
    model = Positions(layer, first, nn.Sequential(nn.Flatten(), nn.Linear(outputs, 3)))
    x, y = torch.randn(5, *shape), torch.randint(3, (5,))
    gradients, a, u = oracle.per_sample(model, cross_entropy, x, y, "layer")

    groups = 1 if isinstance(layer, nn.Linear) else layer.groups

    def joint(weight: Tensor | None, bias: Tensor | None) -> Tensor:
        columns = [p.reshape(groups, len(p) // groups, -1) for p in (weight, bias) if p is not None]
        return torch.cat(columns, dim=-1)

    assert gradients.shape[:2] == (5, groups)
    for g in range(groups):
        close(oracle.gradient_matrices(a[:, g], u[:, g]), gradients[:, g])
    cross_entropy(model(x), y).backward()
    bias_grad = None if layer.bias is None else layer.bias.grad
    close(gradients.mean(0), joint(layer.weight.grad, bias_grad))
    with torch.no_grad():  # rows times weights is the layer itself
        hidden = torch.tanh(first(x))
        close(a, oracle.input_rows(layer, hidden))
        product = torch.einsum("goi,bgti->bgot", joint(layer.weight, layer.bias), a)
        expected = layer(hidden)
        if isinstance(layer, nn.Linear):
            expected = expected.movedim(-1, 1)
        close(product.reshape(expected.shape), expected)


def test_02_unfold_layout() -> None:
    conv = nn.Conv2d(3, 2, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), bias=False)
    x = torch.randn(4, 3, 6, 7)
    columns = unfold(x, (3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 1))
    close(oracle.input_rows(conv, x)[:, 0], columns.transpose(1, 2))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_03_batched_backward_scales(reduction: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    hidden = model[0](x)
    loss = cross_entropy(model[2](model[1](hidden)), y, reduction=reduction)
    (grad_output,) = torch.autograd.grad(loss, hidden)
    u = oracle.per_sample(model, cross_entropy, x, y, "0").u[:, 0, 0]
    close(u, grad_output * (5 if reduction == "mean" else 1))


@pytest.mark.parametrize("t", [1, 3])
def test_03_permuting_and_splitting_the_batch(t: int) -> None:
    a, u = rows(t=t)
    order = torch.randperm(9)
    for s in SHARINGS:
        whole = oracle.shared_fisher(a, u, s)
        close(oracle.shared_fisher(a[order], u[order], s), whole)
        parts = [oracle.shared_fisher(a[i], u[i], s) * len(i) / 9 for i in order.split([2, 4, 3])]
        close(torch.stack(parts).sum(0), whole)


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("lam", [1e-3, 0.5, 100.0])
def test_04_matrix_form_of_the_solve(t: int, lam: float) -> None:
    a, u = rows(t=t)
    g = torch.randn(3, 4)
    fisher = oracle.shared_fisher(a, u)
    for factors in factors_of_every_option(a, u).values():
        q_out, q_in = factors.bases()
        projected = q_out.T @ g @ q_in
        kronecker = factors.scale * torch.outer(
            torch.linalg.eigvalsh(factors.outputs), torch.linalg.eigvalsh(factors.inputs)
        )
        tikhonov = q_out @ (projected / (kronecker + lam)) @ q_in.T
        close(tikhonov, oracle.damped_solve(factors.dense(), lam, g))
        corrected = oracle.eigen_corrected(fisher, q_out, q_in)
        scales = oracle.theta(fisher, q_out, q_in)
        by_theta = q_out @ (projected / (scales + lam)) @ q_in.T
        close(by_theta, oracle.damped_solve(corrected, lam, g))


# ------------------------------------------------------------------------------ trace-restricted


@pytest.mark.parametrize("t", [1, 4])
def test_05_traces(t: int) -> None:
    a, u = rows(t=t)
    fisher = oracle.exact_fisher(oracle.gradient_matrices(a, u))
    expected = {
        "exact": fisher.trace(),
        "expand": expand_trace(a, u),
        "reduce": (a.mean(1).square().sum(-1) * u.sum(1).square().sum(-1)).mean(),
    }
    gram = torch.einsum("nti,nsi->nts", a, a) * torch.einsum("nti,nsi->nts", u, u)
    close(gram.sum((1, 2)).mean(), fisher.trace())
    close(oracle.gradient_matrices(a, u).square().sum((1, 2)).mean(), fisher.trace())
    for s in SHARINGS:
        sigma, phi, psi = oracle.tkfac(a, u, s)
        close(sigma, expected[s])
        close(phi.trace(), 1.0)
        close(psi.trace(), 1.0)
        close(oracle.tkfac(a, u, s).dense().trace(), expected[s])
        close(oracle.shared_fisher(a, u, s).trace(), expected[s])


@pytest.mark.parametrize("t", [1, 4])
def test_06_factors_are_partial_traces(t: int) -> None:
    a, u = rows(t=t)
    gradients = oracle.gradient_matrices(a, u)
    fisher = oracle.exact_fisher(gradients)
    n_phi, n_psi = oracle.partial_traces(fisher, 3, 4)
    four = fisher.reshape(3, 4, 3, 4)
    close(n_phi, torch.einsum("kikj->ij", four))
    close(n_psi, torch.einsum("ikjk->ij", four))
    close(n_phi, (gradients.mT @ gradients).mean(0))
    close(n_psi, (gradients @ gradients.mT).mean(0))
    close(n_phi, (a.mT @ (u @ u.mT) @ a).mean(0))
    close(n_psi, (u.mT @ (a @ a.mT) @ u).mean(0))

    a2, u2 = a.square().sum(-1), u.square().sum(-1)
    sigma, phi, psi = oracle.tkfac(a, u, "expand")
    close(sigma * phi, torch.einsum("nt,nti,ntj->ij", u2, a, a) / len(a))
    close(sigma * psi, torch.einsum("nt,nti,ntj->ij", a2, u, u) / len(a))
    abar, uhat = a.mean(1), u.sum(1)
    sigma, phi, psi = oracle.tkfac(a, u, "reduce")
    close(sigma * phi, torch.einsum("n,ni,nj->ij", uhat.square().sum(1), abar, abar) / len(a))
    close(sigma * psi, torch.einsum("n,ni,nj->ij", abar.square().sum(1), uhat, uhat) / len(a))
    if t == 1:
        for s in SHARINGS:
            close(oracle.tkfac(a, u, s).dense(), oracle.tkfac(a, u).dense())


def test_06_zero_layer() -> None:
    a, u = rows()
    sigma, phi, psi = oracle.tkfac(a, 0 * u)
    assert sigma == 0
    close(phi, torch.eye(4) / 4)
    close(psi, torch.eye(3) / 3)


def test_07_trace_of_kfac() -> None:
    a, u = rows()
    a2, u2 = a.square().sum((1, 2)), u.square().sum((1, 2))
    covariance = (a2 * u2).mean() - a2.mean() * u2.mean()
    close(oracle.kfac_expand(a, u).dense().trace(), oracle.shared_fisher(a, u).trace() - covariance)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_08_scaling(sharing: Sharing) -> None:
    a, u = rows(t=3)
    scaled, plain = oracle.tkfac(1.7 * a, 0.3 * u, sharing), oracle.tkfac(a, u, sharing)
    close(scaled.scale, (1.7 * 0.3) ** 2 * plain.scale)
    close(scaled.inputs, plain.inputs)
    close(scaled.outputs, plain.outputs)


@pytest.mark.parametrize("t", [1, 4])
def test_09_margins(t: int) -> None:
    a, u = rows(t=t)
    fisher, factors = oracle.shared_fisher(a, u), oracle.tkfac(a, u)
    lam_psi, lam_phi = map(torch.linalg.eigvalsh, (factors.outputs, factors.inputs))
    table = oracle.theta(fisher, *factors.bases())
    close(table.sum(0), factors.scale * lam_phi)
    close(table.sum(1), factors.scale * lam_psi)
    independent = torch.outer(table.sum(1), table.sum(0)) / table.sum()
    close(oracle.theta(factors.dense(), *factors.bases()), independent)

    q_out, q_in = orthogonal(3), orthogonal(4)
    n_phi, n_psi = oracle.partial_traces(fisher, 3, 4)
    stale = oracle.theta(fisher, q_out, q_in)
    close(stale.sum(0), (q_in.T @ n_phi @ q_in).diagonal())
    close(stale.sum(1), (q_out.T @ n_psi @ q_out).diagonal())


@pytest.mark.parametrize("t", [1, 3])
def test_10_product_of_marginals(t: int) -> None:
    a, u = rows(b=40, t=t)
    sigma, phi, psi = oracle.tkfac(a, u)
    rho = oracle.shared_fisher(a, u) / sigma
    least = oracle.von_neumann_divergence(rho, torch.kron(psi, phi))

    def entropy(matrix: Tensor) -> Tensor:
        values = torch.linalg.eigvalsh(matrix)
        return -(values * values.log()).sum()

    close(least, entropy(phi) + entropy(psi) - entropy(rho))
    for step in (1e-3, 1e-1, 1.0):
        for _ in range(5):
            x, y = torch.randn(4, 4), torch.randn(3, 3)
            x = phi + step * x @ x.T
            y = psi + step * y @ y.T
            other = torch.kron(y / y.trace(), x / x.trace())
            assert least < oracle.von_neumann_divergence(rho, other)
    gap = oracle.shared_fisher(a, u) - oracle.tkfac(a, u).dense()
    assert gap.norm() <= torch.linalg.eigvalsh(gap).abs().sum() <= sigma * (2 * least).sqrt()


# -------------------------------------------------------------------------- eigenvalue correction


@pytest.mark.parametrize("t", [1, 4])
def test_11_cheap_theta(t: int) -> None:
    a, u = rows(t=t)
    fisher, gradients = oracle.shared_fisher(a, u), oracle.gradient_matrices(a, u)
    bases = [factors.bases() for factors in factors_of_every_option(a, u).values()]
    for q_out, q_in in [*bases, (orthogonal(3), orthogonal(4))]:
        dense = oracle.theta(fisher, q_out, q_in)
        assert (dense >= -1e-14 * dense.max()).all()
        close(dense.sum(), fisher.trace())
        close((q_out.T @ gradients @ q_in).square().mean(0), dense)
        project_first = ((u @ q_out).mT @ (a @ q_in)).square().mean(0)
        close(project_first, dense)
        squares = torch.einsum("nto,nti->oi", (u @ q_out).square(), (a @ q_in).square()) / len(a)
        close(squares, oracle.theta(oracle.shared_fisher(a, u, "expand"), q_out, q_in))
        if t == 1:
            close(squares, dense)
        else:
            close(squares.sum(), expand_trace(a, u))
            assert error(squares, dense) > 0.01


@pytest.mark.parametrize("t", [1, 4])
def test_12_pythagoras(t: int) -> None:
    a, u = rows(t=t)
    fisher = oracle.shared_fisher(a, u)
    for factors in factors_of_every_option(a, u).values():
        bases = factors.bases()
        q, table = torch.kron(*bases), oracle.theta(fisher, *bases)
        corrected = oracle.eigen_corrected(fisher, *bases)
        least = (fisher - corrected).square().sum()
        close(least, fisher.square().sum() - table.square().sum())
        eigenvalues = factors.scale * torch.outer(
            torch.linalg.eigvalsh(factors.outputs), torch.linalg.eigvalsh(factors.inputs)
        )
        base = (fisher - factors.dense()).square().sum()
        close(base - least, (eigenvalues - table).square().sum())
        assert least <= base
        diagonal = torch.randn(3, 4)
        other = q @ torch.diag(diagonal.reshape(-1)) @ q.T
        close((fisher - other).square().sum(), least + (diagonal - table).square().sum())


def test_12_named_blocks() -> None:
    a, u = rows(t=3)
    fisher = oracle.shared_fisher(a, u)
    for s in SHARINGS:
        bases = oracle.tkfac(a, u, s).bases()
        close(oracle.tekfac(a, u, s), oracle.eigen_corrected(fisher, *bases))
    expand, reduced = oracle.kfac_expand(a, u).bases(), oracle.kfac_reduce(a, u).bases()
    close(oracle.ekfac(a, u), oracle.eigen_corrected(fisher, *expand))
    close(oracle.ekfac(a, u, "reduce"), oracle.eigen_corrected(fisher, *reduced))


@pytest.mark.parametrize("t", [1, 3])
def test_13_same_basis_same_block(t: int) -> None:
    a, u = rows(t=t)
    _, inputs, outputs = oracle.kfac_expand(a, u)
    bases = Factored(torch.ones(()), inputs / inputs.trace(), outputs / outputs.trace()).bases()
    close(oracle.eigen_corrected(oracle.shared_fisher(a, u), *bases), oracle.ekfac(a, u))


@pytest.mark.parametrize("t", [1, 3])
def test_14_change_of_basis(t: int) -> None:
    a, u = rows(t=t)
    fisher, lam, g = oracle.shared_fisher(a, u), 0.2, torch.randn(3, 4)
    old_out, old_in = oracle.tkfac(a, u).bases()
    new_out, new_in = orthogonal(3), orthogonal(4)
    held = oracle.eigen_corrected(fisher, old_out, old_in)
    squares_out, squares_in = (old_out.T @ new_out).square(), (old_in.T @ new_in).square()
    rotated = squares_out.T @ oracle.theta(fisher, old_out, old_in) @ squares_in
    close(rotated, oracle.theta(held, new_out, new_in))
    close(rotated.sum(), fisher.trace())

    new_out = old_out[:, [2, 0, 1]] * torch.tensor([1.0, -1.0, -1.0])
    new_in = old_in[:, [3, 1, 0, 2]] * torch.tensor([-1.0, 1.0, -1.0, 1.0])
    flipped = oracle.eigen_corrected(fisher, new_out, new_in)
    close(oracle.damped_solve(flipped, lam, g), oracle.damped_solve(held, lam, g))


def test_15_dead_input() -> None:
    a, u = rows(t=2)
    a[..., 1] = 0.0
    factors = oracle.tkfac(a, u)
    assert factors.inputs[1].abs().max() == 0
    column = oracle.theta(oracle.shared_fisher(a, u), *factors.bases())[:, 0]
    assert column.abs().max() < 1e-14 * factors.scale


def test_16_gradient_square_is_unbiased_over_all_label_draws() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3))
    x = torch.randn(3, 2)
    probabilities = model(x).softmax(-1).detach()
    for layer, d_in in (("0", 3), ("2", 4)):
        expected = oracle.exact_fisher(
            oracle.per_column(oracle.softmax_column, model, x, layer).gradients[:, 0]
        )
        q_out, q_in = orthogonal(3), orthogonal(d_in)
        by_label = torch.stack(
            [oracle.per_sample(model, cross_entropy, x, torch.full((3,), c), layer).gradients for c in range(3)]
        )  # [C, B, 1, d_out, d_in]
        square, outer = torch.zeros(3, d_in), torch.zeros_like(expected)
        for labels in itertools.product(range(3), repeat=3):
            weight = math.prod(float(probabilities[n, c]) for n, c in enumerate(labels))
            drawn = torch.stack([by_label[c, n, 0] for n, c in enumerate(labels)])
            square += weight * 3 * (q_out.T @ drawn.mean(0) @ q_in).square()
            outer += weight * oracle.exact_fisher(drawn)
        close(square, oracle.theta(expected, q_out, q_in))
        close(outer, expected)


def test_null_spaces_of_reduce_factors_leave_the_block_open() -> None:
    """Theta vanishes on null spaces of the other factors; of reduce factors only if T = 1."""
    a, u = rows(b=2, t=2, d_in=7, d_out=6)
    fisher = oracle.shared_fisher(a, u)
    for name, factors in factors_of_every_option(a, u).items():
        turned = []
        for matrix in (factors.outputs, factors.inputs):
            values, q = torch.linalg.eigh(matrix)
            null = int((values < 1e-12 * values.max()).sum())
            assert null > 1
            turned.append(torch.cat([q[:, :null] @ orthogonal(null), q[:, null:]], dim=1))
        block = oracle.eigen_corrected(fisher, *factors.bases())
        if name.endswith("reduce"):
            assert error(oracle.eigen_corrected(fisher, *turned), block) > 0.01
        else:
            close(oracle.eigen_corrected(fisher, *turned), block)


# ----------------------------------------------------------------------------------- exactness


def test_17_one_sample() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(1, 3), torch.tensor([1])
    for layer in ("0", "2"):
        gradients, a, u = oracle.per_sample(model, cross_entropy, x, y, layer)
        for block in four_methods(a[:, 0], u[:, 0]).values():
            close(block, oracle.exact_fisher(gradients[:, 0]))


def test_18_exactly_kronecker() -> None:
    a, u = rows()
    for constant_a, constant_u in ((True, False), (False, True)):
        pair = a[:1].expand_as(a) if constant_a else a, u[:1].expand_as(u) if constant_u else u
        for block in four_methods(*pair).values():
            close(block, oracle.shared_fisher(*pair))
    pairs = list(itertools.product(range(len(a)), range(len(u))))
    product = a[[i for i, _ in pairs]], u[[j for _, j in pairs]]
    for block in four_methods(*product).values():
        close(block, oracle.shared_fisher(*product))

    unit = a / a.norm(dim=-1, keepdim=True), u / u.norm(dim=-1, keepdim=True)
    close(oracle.tkfac(*unit).dense(), oracle.kfac_expand(*unit).dense())
    assert error(oracle.tkfac(*unit).dense(), oracle.shared_fisher(*unit)) > 0.01

    phi, psi = torch.randn(4, 4), torch.randn(3, 3)
    block = torch.kron(psi @ psi.T, phi @ phi.T)
    n_phi, n_psi = oracle.partial_traces(block, 3, 4)
    close(torch.kron(n_psi, n_phi) / block.trace(), block)


@pytest.mark.parametrize("bias", [True, False])
def test_19_deep_linear_network_with_positions(bias: bool) -> None:
    model = nn.Sequential(*(nn.Linear(*s, bias=bias) for s in ((3, 4), (4, 3), (3, 2))))
    x = torch.randn(4, 3, 3)
    for layer in ("0", "1", "2"):
        gradients, a, u = oracle.per_column(oracle.gaussian_column, model, x, layer)
        for block in four_methods(a[:, 0], u[:, 0]).values():
            close(block, oracle.exact_fisher(gradients[:, 0]))


class Pool(nn.Module):
    """Mean or sum over the positions."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1) if self.how == "mean" else x.sum(1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("place", [2, 3])
def test_20_deep_linear_network_with_pooling(bias: bool, how: str, place: int) -> None:
    layers: list[nn.Module] = [nn.Linear(*s, bias=bias) for s in ((3, 4), (4, 3), (3, 2))]
    layers.insert(place, Pool(how))
    model, x = nn.Sequential(*layers), torch.randn(4, 3, 3)
    for index in (i for i in range(4) if i != place):
        gradients, a, u = oracle.per_column(oracle.gaussian_column, model, x, str(index))
        a, u, fisher = a[:, 0], u[:, 0], oracle.exact_fisher(gradients[:, 0])
        close(oracle.kfac_reduce(a, u).dense(), fisher)
        close(oracle.tkfac(a, u).dense(), fisher)
        close(oracle.ekfac(a, u, "reduce"), fisher)
        close(oracle.tekfac(a, u), fisher)
        if index < place:
            assert error(oracle.kfac_expand(a, u).dense(), fisher) > 0.05


def test_20_last_convolution_and_sum_pool() -> None:
    class SumPool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum((2, 3))

    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Conv2d(2, 3, 2), SumPool())
    gradients, a, u = oracle.per_column(oracle.gaussian_column, model, torch.randn(3, 1, 4, 4), "2")
    a, u, fisher = a[:, 0], u[:, 0], oracle.exact_fisher(gradients[:, 0])
    close(oracle.kfac_reduce(a, u).dense(), fisher)
    close(oracle.tkfac(a, u).dense(), fisher)
    assert error(oracle.kfac_expand(a, u).dense(), fisher) > 0.05


def test_21_other_forms_of_kfac() -> None:
    a, u = rows(t=4)
    mean_a = torch.einsum("nti,ntj->ij", a, a) / (9 * 4)
    mean_u = torch.einsum("nti,ntj->ij", u, u) / (9 * 4)
    close(oracle.kfac_expand(a, u).dense(), 4 * torch.kron(mean_u, mean_a))
    sum_a, bar_u = a.sum(1), u.mean(1)
    other = torch.kron(bar_u.T @ bar_u / 9, sum_a.T @ sum_a / 9)
    close(oracle.kfac_reduce(a, u).dense(), other)


def test_22_error_of_one_shared_sample() -> None:
    a, u = rows(b=1, t=5)
    s = torch.linalg.svdvals(oracle.gradient_matrices(a, u)[0])
    s2, s4, s6 = (s.pow(k).sum() for k in (2, 4, 6))
    gap = oracle.shared_fisher(a, u) - oracle.tkfac(a, u).dense()
    close(gap.square().sum(), s2**2 - 2 * s6 / s2 + (s4 / s2) ** 2)


def test_23_softmax_columns() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)), torch.randn(6, 3)
    p = model(x).softmax(-1).detach()
    for layer in ("0", "2"):
        gradients, a, u = oracle.per_column(oracle.softmax_column, model, x, layer)
        fisher = oracle.exact_fisher(gradients[:, 0])
        jacobian = oracle.per_column(oracle.gaussian_column, model, x, layer).gradients[:, 0]
        jacobian = (jacobian / 5**0.5).reshape(5, 6, -1)  # [C, B, d_out * d_in]
        type_two, hessian = torch.zeros_like(fisher), torch.zeros_like(fisher)
        for n in range(6):
            columns = torch.diag(p[n].sqrt()) - torch.outer(p[n], p[n].sqrt())
            v = columns.T @ jacobian[:, n]
            type_two += v.T @ v / 6
            logits = torch.diag(p[n]) - torch.outer(p[n], p[n])
            hessian += jacobian[:, n].T @ logits @ jacobian[:, n] / 6
        close(fisher, type_two)
        close(fisher, hessian)
        close(oracle.shared_fisher(a[:, 0], u[:, 0]), fisher)
    hidden = torch.cat([torch.tanh(model[0](x)), torch.ones(6, 1)], -1).detach()
    sigma = (hidden.square().sum(1) * (1 - p.square().sum(1))).mean()
    close(oracle.tkfac(a[:, 0], u[:, 0]).scale, sigma)


def test_23_one_softmax_per_position() -> None:
    """Labels of different positions are independent, so columns (position, class) suffice."""
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), torch.randn(2, 2, 2)
    fisher = oracle.exact_fisher(oracle.per_column(oracle.softmax_column, model, x, "0").gradients[:, 0])
    p, joint = model(x).softmax(-1).detach(), torch.zeros_like(fisher)
    for labels in itertools.product(range(2), repeat=2):
        y = torch.tensor([labels, labels])

        def loss(logits: Tensor, target: Tensor) -> Tensor:
            return cross_entropy(logits[0], target[0], reduction="sum")

        drawn = oracle.per_sample(model, loss, x, y, "0").gradients[:, 0]
        for n in range(2):
            weight = float(p[n, 0, labels[0]] * p[n, 1, labels[1]])
            joint += weight * oracle.exact_fisher(drawn[[n]]) / 2
    close(fisher, joint)


# -------------------------------------------------------------------------- damping, symmetries


def test_24_location_weighted_convolution() -> None:
    """Patch norms without unfolding weigh every location; scale 1 / sqrt(tr N_1 tr N_2)."""
    conv, x = nn.Conv2d(2, 3, 3, 2, 1), torch.randn(4, 2, 5, 5)
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))
    _, a, u = oracle.per_sample(model, cross_entropy, x, torch.tensor([0, 1, 2, 0]), "0")
    a, u = a[:, 0], u[:, 0]
    a2 = conv2d(x.square(), torch.ones(1, 2, 3, 3), stride=2, padding=1).flatten(1) + 1
    close(a2, a.square().sum(-1))
    n_in = torch.einsum("nt,nti,ntj->ij", u.square().sum(-1), a, a) / 4
    n_out = torch.einsum("nt,nti,ntj->ij", a2, u, u) / 4
    block = torch.kron(n_out, n_in) / (n_in.trace() * n_out.trace()).sqrt()
    close(oracle.tkfac(a, u, "expand").dense(), block)


def test_25_factored_damping() -> None:
    t, lam = 4, 0.3
    a, u = rows(t=t)
    _, inputs, outputs = oracle.kfac_expand(a, u)
    pi = ((inputs.trace() / 4) / (outputs.trace() / 3)).sqrt()
    d1, d2 = pi * lam**0.5, lam**0.5 / pi
    eye_in, eye_out = torch.eye(4), torch.eye(3)
    damped = torch.kron(outputs + d2 * eye_out, inputs + d1 * eye_in)
    terms = torch.kron(outputs, inputs) + d2 * torch.kron(eye_out, inputs)
    close(damped, terms + d1 * torch.kron(outputs, eye_in) + lam * torch.eye(12))
    close(d1 * d2, lam)
    mean_u = outputs / t  # the (mean, mean) form, damping divided by the positions
    pi = ((inputs.trace() / 4) / (mean_u.trace() / 3)).sqrt()
    d1, d2 = pi * (lam / t) ** 0.5, (lam / t) ** 0.5 / pi
    close(t * torch.kron(mean_u + d2 * eye_out, inputs + d1 * eye_in), damped)


@pytest.mark.parametrize("t", [1, 4])
def test_26_relative_damping(t: int) -> None:
    a, u = rows(t=t)
    sigma, phi, psi = oracle.tkfac(a, u)
    table = oracle.theta(oracle.shared_fisher(a, u), *oracle.tkfac(a, u).bases())
    for vartheta in (0.01 * sigma, 100 * sigma):
        close(torch.maximum(table.sum(), vartheta) / 12, torch.maximum(table.mean(), vartheta / 12))
    lam = sigma / 12
    inputs, outputs = sigma.sqrt() * phi, sigma.sqrt() * psi
    pi = ((inputs.trace() / 4) / (outputs.trace() / 3)).sqrt()
    close(pi, (3 / 4) ** 0.5)
    split = torch.kron(outputs + lam.sqrt() / pi * torch.eye(3), inputs + pi * lam.sqrt() * torch.eye(4))
    close(split, sigma * torch.kron(psi + torch.eye(3) / 3, phi + torch.eye(4) / 4))


def test_27_scale_equivariance() -> None:
    a, u = rows(t=3)
    g, c, vartheta = torch.randn(3, 4), 3.7, 0.01

    def step(scale: float, floor: float) -> Tensor:
        block = oracle.tekfac(a, scale * u)
        lam = max(float(block.trace()), floor) / 12
        return oracle.damped_solve(block, lam, scale * g)

    for floor in (vartheta, 1e6):
        close(step(c, floor * c**2), step(1.0, floor) / c)
    assert error(1e9 * oracle.damped_solve(oracle.tekfac(a, u), 1e9, g), g) < 1e-4


@pytest.mark.parametrize("t", [1, 3])
def test_28_orthogonal_equivariance(t: int) -> None:
    a, u = rows(t=t)
    g, lam, r_in, r_out = torch.randn(3, 4), 0.7, orthogonal(4), orthogonal(3)
    blocks, rotated = four_methods(a, u), four_methods(a @ r_in.T, u @ r_out.T)
    for name, block in blocks.items():
        expected = r_out @ oracle.damped_solve(block, lam, g) @ r_in.T
        close(oracle.damped_solve(rotated[name], lam, r_out @ g @ r_in.T), expected)


# ------------------------------------------------------------------------- what is not a theorem


def test_counter_example() -> None:
    a = torch.tensor([[1.0, 0.0], [0.0, -1.0], [1.0, 0.0]])[:, None]
    u = torch.tensor([[1.0, 2.0], [0.0, 2.0], [-1.0, 2.0]])[:, None]
    fisher = oracle.shared_fisher(a, u)
    kfac = (fisher - oracle.kfac_expand(a, u).dense()).norm()
    tkfac = (fisher - oracle.tkfac(a, u).dense()).norm()
    assert round(float(kfac), 4) == 0.3143
    assert round(float(tkfac), 4) == 0.3810
