"""How far a result may lie from the float64 reference, per dtype: one table for benchmark and tests.

An error is relative to the largest magnitude in the reference, so that one bound serves every layer and
every network here. It bounds whole networks of about ten layers; a single kernel stays far below.
"""

from typing import Any

import numpy as np

TOLERANCES = {
    # Unit roundoff 6e-8; ten layers with sums of up to 192 products, in any order, reach 1e-6;
    # algorithms that change the arithmetic (Winograd, FFT) lose another digit. A wrong weight gives 1e-2.
    "float32": 2e-5,
    # 10-bit mantissa in the products (unit roundoff 5e-4), fp32 sums, averaging out within a layer.
    "tf32": 5e-3,
    # Each of about 20 stored activations is rounded to 11 bits (5e-4); sums may be fp16 too on some paths.
    "float16": 1e-2,
    # As float16 with 8 bits (4e-3).
    "bfloat16": 6e-2,
    # The reference's own kind: two orders of summation.
    "float64": 1e-12,
}


def compare(result: np.ndarray, reference: np.ndarray, dtype: str) -> dict[str, Any]:
    """Compare `result` with `reference` (same shape) under the tolerance of `dtype`; a JSON-able dict.

    Keys: passed; relative_error (largest error ÷ largest |reference|, None where a result is not finite);
    where (index of the largest error); value and expected there; tolerance; problem (None, or one sentence).
    """
    tolerance = TOLERANCES[dtype]
    check: dict[str, Any] = {"passed": False, "tolerance": tolerance, "relative_error": None, "where": None}
    check |= {"value": None, "expected": None, "problem": None}
    if result.shape != reference.shape:
        return check | {"problem": f"the output has shape {result.shape}, the reference {reference.shape}"}
    result, reference = result.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(result)
    errors = np.where(finite, np.abs(result - reference), np.inf)
    where = np.unravel_index(np.argmax(errors), errors.shape)
    check |= {"where": [int(i) for i in where], "expected": float(reference[where])}
    if not finite.all():
        return check | {"problem": f"{int((~finite).sum())} of {result.size} outputs are not finite numbers"}
    scale = float(np.abs(reference).max()) or 1.0
    relative = float(errors[where]) / scale
    check |= {"relative_error": relative, "value": float(result[where]), "passed": relative <= tolerance}
    if not check["passed"]:
        check["problem"] = (
            f"largest relative error {relative:.2g} at {check['where']}: {check['value']:.6g} instead of "
            f"{check['expected']:.6g}; {dtype} is allowed {tolerance:.0e}"
        )
    return check
