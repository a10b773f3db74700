"""Layers of Hugging Face's transformers, by their full names: the package is not imported for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tekfac.layers.kinds.base import LayerKind
from tekfac.layers.kinds.embedding import TableKind
from tekfac.layers.kinds.linear import LinearKind
from tekfac.layers.kinds.norm import UnitKind


def _rms_norm(module: nn.Module, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + float(module.variance_epsilon))  # type: ignore[arg-type]


_CONV1D = LinearKind(layout="input first")
_RMS_NORM = UnitKind(by_sample=True, bias=None, normalise=_rms_norm)
_SCALED_TABLE = TableKind(scale=lambda module: module.embed_scale)  # type: ignore[arg-type, return-value]

KINDS: dict[type[nn.Module] | str, LayerKind] = {
    "transformers.pytorch_utils.Conv1D": _CONV1D,
    **{
        f"transformers.models.{model}.modeling_{model}.{norm}": _RMS_NORM
        for model, norm in {
            "llama": "LlamaRMSNorm",
            "mistral": "MistralRMSNorm",
            "mixtral": "MixtralRMSNorm",
            "phi3": "Phi3RMSNorm",
            "qwen2": "Qwen2RMSNorm",
            "qwen3": "Qwen3RMSNorm",
            "t5": "T5LayerNorm",
        }.items()
    },
    "transformers.models.bart.modeling_bart.BartScaledWordEmbedding": _SCALED_TABLE,
    "transformers.models.gemma2.modeling_gemma2.Gemma2TextScaledWordEmbedding": _SCALED_TABLE,
    "transformers.models.gemma3.modeling_gemma3.Gemma3TextScaledWordEmbedding": _SCALED_TABLE,
}
