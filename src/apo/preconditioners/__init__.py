"""Preconditioners: torch optimizers whose meta-parameters are matrices.

- :class:`Kronecker`, :class:`Eigenbasis`, :class:`Diagonal` and :class:`Full` are the optimizers;
  :class:`Preconditioner` is their base class.
- A :class:`Block` is the learned matrix of one layer. A :class:`View` reshapes a layer's parameters into the tensor
  that the block takes. :func:`plan_layers` gives every parameter of a model both.
"""

from apo.preconditioners.block import Block, KroneckerBlock
from apo.preconditioners.eigenbasis_block import EigenbasisBlock
from apo.preconditioners.factored_conv_block import FactoredConvBlock
from apo.preconditioners.optimizer import Preconditioner
from apo.preconditioners.plan import Layer, plan_layers
from apo.preconditioners.simple_blocks import DiagonalBlock, FullBlock
from apo.preconditioners.structures import Diagonal, Eigenbasis, Full, Kronecker
from apo.preconditioners.views import (
    ChannelsLastView,
    ConcatenatedView,
    MatrixView,
    ReshapeView,
    TransposedConvView,
    View,
)

__all__ = [
    "Preconditioner",
    "Kronecker",
    "Eigenbasis",
    "Diagonal",
    "Full",
    "Block",
    "KroneckerBlock",
    "FactoredConvBlock",
    "EigenbasisBlock",
    "DiagonalBlock",
    "FullBlock",
    "Layer",
    "plan_layers",
    "View",
    "MatrixView",
    "ReshapeView",
    "ChannelsLastView",
    "TransposedConvView",
    "ConcatenatedView",
]
