"""The exceptions and the warning of ``apo``; wrong arguments raise Python's ``TypeError`` and ``ValueError``."""

from __future__ import annotations

__all__ = ["ApoWarning", "MissingBatchError", "NonFiniteError", "NotLinearError", "ReplayError"]


class ApoWarning(UserWarning):
    """Something that does not stop training but that the user should know about.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", ApoWarning)  # be strict while debugging
        >>> warnings.simplefilter("default", ApoWarning)
    """


class NotLinearError(ValueError):
    """The optimizer's step is not proportional to its learning rate, so the rate cannot be learned.

    Example:
        >>> issubclass(NotLinearError, ValueError)
        True
    """


class MissingBatchError(RuntimeError):
    """A meta-step had no batch to evaluate a term of the objective on.

    Example:
        >>> issubclass(MissingBatchError, RuntimeError)
        True
    """


class NonFiniteError(FloatingPointError):
    """The loss or the weights became infinite or NaN.

    Example:
        >>> issubclass(NonFiniteError, ArithmeticError)
        True
    """


class ReplayError(RuntimeError):
    """A recorded forward pass cannot be run again at other weights.

    Example:
        >>> issubclass(ReplayError, RuntimeError)
        True
    """
