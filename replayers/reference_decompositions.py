"""Float64 formulas of decompositions, as far as they are determined.

Eigenvalues and singular values move by no more than the matrix does (Weyl; Golub and Van Loan,
"Matrix computations", 2013, sections 8.1 and 8.6). Their vectors have any sign, and turn in their
plane where two values are close: any of them is allowed.
"""

from __future__ import annotations

import math

import numpy as np

from tracediff.replayers.reference_operations import (
    FUNCTION,
    argument,
    formula,
    rounded,
    roundoff,
    widen,
)
from tracediff.replaying import Floats, Operation, Replayed


@formula("_linalg_eigh")
def _eigh(operation: Operation) -> Replayed | None:
    """Outputs 0 and 1: eigenvalues, ascending, and eigenvectors of a symmetric matrix."""
    if argument(operation, "UPLO", default="L") != "L":
        return None
    data = widen(operation.inputs[0])
    values, vectors = np.linalg.eigh(data)
    if operation.output:
        return rounded(operation, vectors, np.inf)
    return rounded(operation, values, _moved(operation, data))


@formula("_linalg_svd")
def _svd(operation: Operation) -> Replayed | None:
    """Outputs 0 to 2: left vectors, singular values, descending, and right vectors."""
    data = widen(operation.inputs[0])
    whole = bool(argument(operation, "full_matrices", default=False))
    if operation.output == 1:
        return rounded(operation, np.linalg.svd(data, compute_uv=False), _moved(operation, data))
    left, _, right = np.linalg.svd(data, full_matrices=whole)
    return rounded(operation, right if operation.output else left, np.inf)


def _moved(operation: Operation, data: Floats) -> Floats:
    """Spread of a value: the error of the matrix (..., m, n) that it is exactly of."""
    size = np.linalg.norm(data, axis=(-2, -1))[..., None]
    moved: Floats = FUNCTION * roundoff(operation) * math.sqrt(max(data.shape[-2:])) * size
    return moved
