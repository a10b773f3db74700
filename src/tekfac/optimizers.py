"""The four public optimizers. What tells them apart is in methods.py."""

from __future__ import annotations

from typing import final

from tekfac import methods
from tekfac.optim.natural_gradient import NaturalGradient


@final
class KFAC(NaturalGradient):
    """F ~ A (x) U: plain Kronecker factors (Martens and Grosse 2015)."""

    method = methods.KFAC


@final
class EKFAC(NaturalGradient):
    """KFAC's eigenbasis with the second moments measured in it (George et al. 2018)."""

    method = methods.EKFAC


@final
class TKFAC(NaturalGradient):
    """F ~ sigma Phi (x) Psi: factors that keep the trace of F (Gao et al. 2020a)."""

    method = methods.TKFAC


@final
class TEKFAC(NaturalGradient):
    """TKFAC's eigenbasis with the second moments measured in it (Gao et al. 2020b).

    A `torch.optim.Optimizer` that takes the model instead of its parameters:

        optimizer = TEKFAC(model, lr=your_adamw_lr)

    Linear layers, convolutions, embeddings, attention, recurrent layers and norms are preconditioned, and types
    of your own after `tekfac.register_layer`; every other parameter is trained by AdamW.
    `tekfac.explain(model)` tells what will be done with a model. `TEKFAC.natural(model)` takes the natural
    gradient proper, and `TEKFAC.paper(model)` has the paper's own settings.
    """

    method = methods.TEKFAC
