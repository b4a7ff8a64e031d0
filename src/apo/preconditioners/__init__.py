"""Preconditioners: torch optimizers whose meta-parameters are matrices.

- :class:`Kronecker`, :class:`Diagonal` and :class:`Full` are the optimizers; :class:`Preconditioner` is what
  a rule of APO needs to know of them.
- A :class:`Block` is the learned matrix of one layer, a :class:`View` the way from a layer's parameters to
  the tensor that the block takes, and :func:`plan_layers` gives every parameter of a model both.
"""

from .base import Preconditioner
from .block import Block
from .diagonal import Diagonal
from .diagonal_block import DiagonalBlock
from .factored_conv_block import FactoredConvBlock
from .full import Full
from .full_block import FullBlock
from .kronecker import Kronecker
from .kronecker_block import KroneckerBlock
from .layers import Layer, plan_layers
from .views import ChannelsLastView, ConcatenatedView, MatrixView, ReshapeView, TransposedConvView, View

__all__ = [
    "Preconditioner",
    "Kronecker",
    "Diagonal",
    "Full",
    "Block",
    "KroneckerBlock",
    "FactoredConvBlock",
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
