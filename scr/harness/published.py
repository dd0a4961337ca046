"""Published figures: the article's, on an Apple M1 with 8 GB, fp32. The one place that holds them."""

MACHINE = "Apple M1, 8 GB"
LABEL = "published, M1"
BATCH_SIZES = (1, 16, 64, 128, 256, 512)

# P50 in ms per forward; "torch" ran on MPS.
P50_MS = {
    "torch": dict(zip(BATCH_SIZES, (2.947, 3.349, 10.113, 20.333, 39.548, 88.435), strict=True)),
    "mlx": dict(zip(BATCH_SIZES, (2.858, 9.372, 37.556, 79.516, 165.108, 331.672), strict=True)),
    "mlx-fused": dict(zip(BATCH_SIZES, (1.917, 4.406, 12.999, 29.516, 59.509, 126.967), strict=True)),
}


def speedups(backend: str, baseline: str) -> dict[int, float]:
    """Batch size -> published P50 of `baseline` ÷ that of `backend`; empty where either was not published."""
    if not {backend, baseline} <= set(P50_MS):
        return {}
    return {size: P50_MS[baseline][size] / P50_MS[backend][size] for size in BATCH_SIZES}


# At batch 1 the published times are launches × this: 2.858 ms ÷ 93 and 1.917 ms ÷ 65 launches.
LAUNCH_MS = (P50_MS["mlx"][1] / 93 + P50_MS["mlx-fused"][1] / 65) / 2
