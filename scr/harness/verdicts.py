"""What pays on this machine, in five sentences computed from a group of a record."""

from itertools import combinations

from harness import published
from harness.analysis import OWN_KERNELS, PEERS, PLAIN, Group
from harness.present import present
from harness.statistics import NOISY_CV_PERCENT, Comparison
from harness.tables import count, interval, milliseconds, percent, ratio, span, words


def five_sentences(group: Group) -> list[str]:
    """What to use; the article's kernel; kernels against what is free; where the time goes; how sure."""
    return [
        fastest_sentence(group),
        article_sentence(group),
        kernels_sentence(group),
        limit_sentence(group),
        trust_sentence(group),
    ]


def fastest_sentence(group: Group) -> str:
    """Which backend is fastest at which batch, and how far ahead of the peer."""
    peer = group.first_of(PEERS)
    spans: list[tuple[str, list[int]]] = []
    level: list[str] = []
    for size in group.batch_sizes:
        best = present(group.fastest(size))
        if spans and spans[-1][0] == best:
            spans[-1][1].append(size)
        else:
            spans.append((best, [size]))
        level += _level(group, best, size)
    parts = []
    for best, sizes in spans:
        first, last = (milliseconds(present(group.p50(best, n))) for n in (sizes[0], sizes[-1]))
        text = f"`{best}` at batch {words(sizes)} ({first}"
        text += f" to {last} ms" if len(sizes) > 1 else " ms"
        found = [one for n, one in compared(group, best, peer) if n in sizes] if peer and best != peer else []
        text += f"; {against(found, peer)})" if peer and found else ")"
        parts.append(text)
    text = f"**Fastest here** is {words(parts, 'then')}"
    return text + (f"; not decidedly faster than {words(level)}." if level else ".")


def _level(group: Group, best: str, size: int) -> list[str]:
    """Backends that the fastest one is not decidedly faster than."""
    others = [(name, group.speedup(best, name, size)) for name in group.backends if name != best]
    return [f"`{name}` at batch {size}" for name, one in others if one and one.verdict != "faster"]


def article_sentence(group: Group) -> str:
    """What the article's kernel gives over MLX as written, beside what was published."""
    start = "**The article's kernel** (`mlx-fused`)"
    found = compared(group, "mlx-fused", "mlx")
    if not found:
        return f"{start} was not measured beside `mlx` in this run, so its gain here is unknown."
    known = list(published.speedups("mlx-fused", "mlx").values())
    return (
        f"{start}, against MLX as written: {by_verdict(found)} "
        f"({published.LABEL}: {span(min(known), max(known))} times faster)."
    )


def kernels_sentence(group: Group) -> str:
    """The best of our kernels against the best that costs no kernel."""
    own = tuple(name for name in OWN_KERNELS if name in group.backends)
    free = tuple(name for name in PLAIN if name in group.backends)
    if not own or not free:
        return "**Custom kernels**: this run lacks them or MLX without them, so it cannot say if they pay."
    honest = "mlx-folded" in free
    found = best_against_best(group, own, free)
    if not found:
        return "**Custom kernels** and MLX without them share no batch size in this run."
    text = f"**Custom kernels**, the best of them against the best MLX without any: {by_verdict(found)}"
    text += "" if honest else " (this run lacks the honest baseline, folded and compiled)"
    peers = tuple(name for name in group.backends if name.startswith("torch") or name == "onnxruntime")
    against_peers = best_against_best(group, own, peers)
    if against_peers:
        names = words([f"`{name}`" for name in peers])
        text += f"; against the best of {names}: {by_verdict(against_peers)}"
    return text + "."


def best_against_best(
    group: Group, ours: tuple[str, ...], theirs: tuple[str, ...]
) -> list[tuple[int, Comparison]]:
    """(batch, the fastest of `ours` against the fastest of `theirs`) wherever both were measured."""
    pairs = [(size, group.fastest(size, ours), group.fastest(size, theirs)) for size in group.batch_sizes]
    found = [(size, group.speedup(one, other, size)) for size, one, other in pairs if one and other]
    return [(size, one) for size, one in found if one is not None]


def limit_sentence(group: Group) -> str:
    """How near the fastest backend is to the machine's limits, and what bounds it."""
    parts = []
    for size in dict.fromkeys((group.batch_sizes[0], group.batch_sizes[-1])):
        best = present(group.fastest(size))
        cost, floor, median = group.cost(best, size), group.floor_ms(best, size), group.p50(best, size)
        if not floor or not median:
            continue
        terms: dict[str, float] = {
            "launches": cost.get("launch_ms") or 0.0,
            "bytes": cost["bytes_ms"],
            "arithmetic": cost["arithmetic_ms"],
        }
        text = (
            f"at batch {size} `{best}` reaches {percent(100 * floor / median)} of its floor of "
            f"{milliseconds(floor)} ms, most of which is {max(terms, key=lambda name: terms[name])}"
        )
        if floor > 1.05 * median:
            text += " (above 100 %: a ceiling was measured too low)"
        missing = group.missing_term(best, size)
        parts.append(text + (f" (missing: {missing})" if missing else ""))
    if not parts:
        return "**The limit**: no ceilings were measured in this run, so no floor can be given."
    return f"**The limit**: {'; '.join(parts)}."


def trust_sentence(group: Group) -> str:
    """How quiet the machine was and how many comparisons were decided."""
    summaries = {(n, s): group.summary(n, s) for n in group.backends for s in group.batch_sizes}
    cells = {cell: summary for cell, summary in summaries.items() if summary is not None}
    states = [group.cell(*cell).get("state") for cell in cells]
    noisy = sum(summary.noisy for summary in cells.values())
    text = f"**How sure**: of {count(len(cells), 'cell')} {states.count('steady')} were steady"
    text += f", {states.count('drifting')} drifted, {states.count('few')} have too few trials for a P95"
    text += f", {noisy} scattered by more than {NOISY_CV_PERCENT:.0f} %"
    pairs = [
        one
        for size in group.batch_sizes
        for first, second in combinations(group.backends, 2)
        if (one := group.speedup(first, second, size)) is not None
    ]
    decided = sum(one.verdict != "undecided" for one in pairs)
    return text + (f"; {decided} of {count(len(pairs), 'pair')} of backends are decided." if pairs else ".")


def compared(group: Group, backend: str, baseline: str) -> list[tuple[int, Comparison]]:
    """(batch, comparison) wherever both were measured."""
    found = [(size, group.speedup(backend, baseline, size)) for size in group.batch_sizes]
    return [(size, one) for size, one in found if one is not None]


def by_verdict(found: list[tuple[int, Comparison]]) -> str:
    """What comparisons say: 1.2–1.4 times faster at batch 1 and 16, equivalent at batch 64."""
    phrases = {
        "faster": "{} times faster",
        "slower": "slower ({} times as fast)",
        "equivalent": "equivalent ({} times as fast)",
        "undecided": "undecided ({} times as fast)",
    }
    parts = []
    for verdict, phrase in phrases.items():
        chosen = [(size, one) for size, one in found if one.verdict == verdict]
        if not chosen:
            continue
        ratios = [one.ratio for _, one in chosen]
        shown = interval(chosen[0][1]) if len(chosen) == 1 else span(min(ratios), max(ratios))
        parts.append(f"{phrase.format(shown)} at batch {words([size for size, _ in chosen])}")
    return ", ".join(parts)


def against(found: list[Comparison], peer: str) -> str:
    """Ratios against a peer in words, undecided ones said to be."""
    if len(found) == 1:
        return f"{interval(found[0])} times as fast as {peer}{_unless_faster(found)}"
    ratios = [one.ratio for one in found]
    return f"{ratio(min(ratios))} to {ratio(max(ratios))} times as fast as {peer}{_unless_faster(found)}"


def _unless_faster(found: list[Comparison]) -> str:
    """The verdicts, where they are not all what the ratios suggest."""
    verdicts = list(dict.fromkeys(one.verdict for one in found))
    return "" if verdicts == ["faster"] else f", {words(verdicts)}"
