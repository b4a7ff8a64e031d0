r"""Layers with Kronecker-factored curvature, in one common layout.

A layer multiplies rows by its weight: a linear layer the features of each example (or of each token), a convolution the
patch at each location. In the layout ``[batch, shared, features]`` of activations :math:`a_{nt}` (with a one appended
for the bias) and output gradients :math:`g_{nt}`, the gradient of example n with respect to the weight matrix
``[out, in + 1]`` is :math:`\sum_t g_{nt} a_{nt}^\top` in every case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class FactoredLayer:
    """A linear layer or convolution whose weight and bias share a block of curvature.

    Attributes:
        name: Its name in the network.
        module: The layer.
    """

    name: str
    module: nn.Linear | nn.Conv2d

    @property
    def parameters(self) -> list[Tensor]:
        """The weight and, if there is one, the bias."""
        return [self.module.weight] if self.module.bias is None else [self.module.weight, self.module.bias]

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the statistics: float32 even for a 16-bit network."""
        return torch.float64 if self.module.weight.dtype == torch.float64 else torch.float32

    def activations(self, inputs: Tensor) -> Tensor:
        """Bring the layer's inputs into the layout ``[batch, shared, in (+ 1)]``."""
        inputs = inputs.to(self.dtype)
        if isinstance(self.module, nn.Conv2d):
            rows = _patches(inputs, self.module)
        else:
            rows = inputs.reshape(inputs.shape[0], -1, inputs.shape[-1])
        return rows if self.module.bias is None else functional.pad(rows, (0, 1), value=1.0)

    def output_gradients(self, gradients: Tensor) -> Tensor:
        """Bring gradients of the layer's outputs into the layout ``[batch, shared, out]``."""
        gradients = gradients.to(self.dtype)
        if isinstance(self.module, nn.Conv2d):
            return gradients.flatten(2).transpose(1, 2)
        return gradients.reshape(gradients.shape[0], -1, gradients.shape[-1])

    def join(self, tensors: list[Tensor]) -> Tensor:
        """Make one matrix ``[out, in (+ 1)]`` of tensors shaped like weight and bias."""
        matrix = tensors[0].to(self.dtype).flatten(1)
        return matrix if len(tensors) == 1 else torch.cat([matrix, tensors[1].to(self.dtype).unsqueeze(1)], dim=1)

    def split(self, matrix: Tensor) -> list[Tensor]:
        """Split the matrix into tensors shaped like weight and bias."""
        weight = self.module.weight
        if self.module.bias is None:
            return [matrix.reshape(weight.shape)]
        return [matrix[:, :-1].reshape(weight.shape), matrix[:, -1]]


def factored_layers(network: nn.Module) -> Iterator[FactoredLayer]:
    """Yield the linear layers and convolutions of a network that have Kronecker-factored curvature.

    Not among them are grouped convolutions, convolutions with other than zero padding, layers that are partly frozen,
    and weights that several modules share.
    """
    modules = list(network.named_modules())
    owners: dict[Tensor, int] = {}
    for _, module in modules:
        for parameter in module.parameters(recurse=False):
            owners[parameter] = owners.get(parameter, 0) + 1
    for name, module in modules:
        if not isinstance(module, (nn.Linear, nn.Conv2d)):
            continue
        layer = FactoredLayer(name, module)
        trains = all(p.requires_grad and owners[p] == 1 for p in layer.parameters)
        if isinstance(module, nn.Conv2d) and (module.groups, module.padding_mode) != (1, "zeros"):
            continue
        if trains and getattr(module, "padding", None) != "same":
            yield layer


def _patches(images: Tensor, layer: nn.Conv2d) -> Tensor:
    """Return the patch at each location, ``[batch, locations, channels x height x width]``.

    A view of all windows that is copied once: torch's ``unfold`` for images launches a kernel for every one of them.
    """
    vertical, horizontal = (0, 0) if isinstance(layer.padding, str) else layer.padding  # "valid"
    windows = functional.pad(images, (horizontal, horizontal, vertical, vertical))
    for axis in (0, 1):
        extent = layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1
        windows = windows.unfold(2 + axis, extent, layer.stride[axis])[..., :: layer.dilation[axis]]
    return windows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
