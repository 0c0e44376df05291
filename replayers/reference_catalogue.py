"""The formulas of single operations and of their gradients, all of them in their tables."""

from tracediff.replayers import (
    reference_activations,  # noqa: F401  (each enters its formulas into the table)
    reference_backward,  # noqa: F401
    reference_complex,  # noqa: F401
    reference_convolution,  # noqa: F401
    reference_creation,  # noqa: F401
    reference_decompositions,  # noqa: F401
    reference_fused,  # noqa: F401
    reference_layout,  # noqa: F401
    reference_loss_operations,  # noqa: F401
    reference_reductions,  # noqa: F401
    reference_resampling,  # noqa: F401
    reference_scans,  # noqa: F401
    reference_statistics,  # noqa: F401
    reference_vjp_fused,  # noqa: F401
)
from tracediff.replayers import reference_operations as operations
from tracediff.replayers import reference_vjp as vjp

__all__ = ["operations", "vjp"]
