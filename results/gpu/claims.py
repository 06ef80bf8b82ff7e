"""What is claimed of GPUs, held against what was measured: passed, failed or undecided. Numbers in, words out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

Verdict = Literal["passed", "failed", "undecided"]
PEAK, STEP, HIDDEN, FILL, BEATEN = 0.05, 0.05, 0.90, 0.95, 0.10
Found = Mapping[str, Mapping[str, Any]]  # the data of each item that has any, by slug


class Claim(NamedTuple):
    """One claim; ``detail`` says by which numbers."""

    text: str
    verdict: Verdict
    detail: str


def judged(found: Found) -> list[Claim]:
    """All claims. What was not measured is undecided."""
    return [
        _contract(found.get("1-contract", {})),
        _attention(found.get("1-attention", {})),
        _released(found.get("1-released", {})),
        _stress(found.get("2-stress", {})),
        _host(found.get("2-host-budget", {})),
        _overlap(found.get("2-overlap", {})),
        *_foresight([data for slug, data in found.items() if slug.startswith("4-")]),
        *_jobs({slug: data for slug, data in found.items() if slug[0] in "56"}),
    ]


def _verdict(right: bool | None) -> Verdict:
    return "undecided" if right is None else "passed" if right else "failed"


def _contract(data: Mapping[str, Any]) -> Claim:
    text = "gradients are bit-equal with plain training for every policy, architecture and precision"
    if not data:
        return Claim(text, "undecided", "not measured")
    bad, lost = data["failed"], data["lost"]
    detail = f"{data['passed']} of {data['tests']} tests pass, {bad} fail, {data['skipped']} skipped, {lost} lost"
    return Claim(text, "failed" if bad else _verdict(None if lost or not data["passed"] else True), detail)


def _attention(data: Mapping[str, Any]) -> Claim:
    text = "fused attention that is kept does not run again"
    if not data:
        return Claim(text, "undecided", "not measured")
    rows = data["rows"]
    once, twice, kept = (rows[n] for n in ("save everything", "recompute all", "keep attention"))
    detail = f"{kept['of these once more']} of {kept['attentions kept']} run once more; "
    detail += f"kernels {once['kernels']} / {twice['kernels']} / {kept['kernels']} (save / recompute / keep)"
    if not once["kernels"] or not kept["attentions kept"]:
        return Claim(text, "undecided", detail)
    right = twice["kernels"] == 2 * once["kernels"] and kept["kernels"] == once["kernels"]
    return Claim(text, _verdict(right and kept["of these once more"] == 0), detail)


def _released(data: Mapping[str, Any]) -> Claim:
    text = "memory that a plan releases is free: what is alive is what the ghost run says, within 5 %"
    worst, count = 0.0, 0
    for row in data.get("rows", {}).values():
        for when in ("after forward", "after backward"):
            if row[when] is not None:
                worst, count = (
                    max(worst, abs(row[when] - row[f"{when}, ghost"]) / max(row["peak, ghost"], 1)),
                    count + 1,
                )
    detail = f"largest difference {worst:.2%} of the peak, over {count} readings"
    return Claim(text, _verdict(worst <= PEAK if count else None), detail)


def _stress(data: Mapping[str, Any]) -> Claim:
    text = "offloading uses nothing after it was freed: gradients bit-equal at every step under pressure"
    if not data:
        return Claim(text, "undecided", "not measured")
    steps = sum(row["steps"] for row in data["rows"].values())
    unequal = sum(row["unequal steps"] for row in data["rows"].values())
    detail = f"{unequal} of {steps} steps differ" + (
        "" if data["repeats"] else "; plain training does not repeat itself"
    )
    return Claim(text, _verdict(unequal == 0 if data["repeats"] else None), detail)


def _host(data: Mapping[str, Any]) -> Claim:
    text = "pinned memory keeps to --host-budget and is used again from step to step"
    if not data:
        return Claim(text, "undecided", "not measured")
    right = (
        data["claimed under the budget"] <= data["budget"]
        and data["half of it refused"]
        and data["growths in later steps"] == 0
    )
    detail = f"{data['claimed under the budget']} of {data['budget']} bytes, "
    detail += f"{data['growths in later steps']} growths after the first step"
    return Claim(text, _verdict(right), detail)


def _overlap(data: Mapping[str, Any]) -> Claim:
    text = "offload hides at least 90 % of its copy time where the link's bandwidth allows"
    rows = {name: row for name, row in data.get("rows", {}).items() if row.get("link allows it")}
    shares = {name: row["hidden"] for name, row in rows.items() if row["hidden"] is not None}
    if not shares:
        return Claim(text, "undecided", "no plan whose copies fit beside its compute was profiled")
    least = min(shares.values())
    return Claim(text, _verdict(least >= HIDDEN), ", ".join(f"{n}: {s:.1%}" for n, s in shares.items()))


def _foresight(items: list[Mapping[str, Any]]) -> Iterator[Claim]:
    rows = [row for data in items for row in data.get("rows", {}).values()]
    for what, limit, name in (
        ("allocated", PEAK, "peak (allocated)"),
        ("reserved", PEAK, "peak (reserved)"),
        ("step", STEP, "step time"),
    ):
        pairs = [
            (row[f"{what}, predicted"], row[what]) for row in rows if row.get(what) and row.get(f"{what}, predicted")
        ]
        text = f"{name} predicted within {limit:.0%}"
        if not pairs:
            yield Claim(text, "undecided", "not measured")
            continue
        errors = sorted(abs(guess / real - 1) for guess, real in pairs)
        right = sum(e <= limit for e in errors)
        detail = f"{right} of {len(errors)} plans; worst {errors[-1]:.1%}, median {errors[len(errors) // 2]:.1%}"
        yield Claim(text, _verdict(right == len(errors)), detail)


def _jobs(items: Found) -> Iterator[Claim]:
    for slug, data in items.items():
        for budget, found in data.get("budgets", {}).items():
            rows = found.get("rows", {})
            yield _fastest(f"{slug[2:]} at {budget}", rows)
            yield _fills(f"{slug[2:]} at {budget}", found)
            if budget == data.get("middle"):
                yield _beats(f"{slug[2:]} at {budget}", rows)


def _fastest(where: str, rows: Mapping[str, Any]) -> Claim:
    """Passed by the medians of interleaved steps; failed only where somebody is surely faster."""
    text = f"{where}: ours is the fastest of the rows that fit"
    ours = rows.get("ours", {}).get("step")
    rivals = {n: r for n, r in rows.items() if "ours over it" in r and not n.startswith("torch.compile")}
    if ours is None or not rivals:
        return Claim(text, "undecided", "ours or its rivals were not measured")
    name = min(rivals, key=lambda n: rivals[n]["step"])
    low, value, high = rivals[name]["ours over it"]
    detail = f"{value:.3f} [{low:.3f}, {_end(high)}] times the next, {name}"
    faster = [n for n, r in rivals.items() if r["ours over it"][0] > 1]
    if faster:
        return Claim(text, "failed", f"{detail}; surely faster: {', '.join(faster)}")
    return Claim(text, _verdict(True if ours <= rivals[name]["step"] else None), detail)


def _beats(where: str, rows: Mapping[str, Any]) -> Claim:
    text = f"{where}: recompute-all is beaten by at least 10 % of step time"
    ratio = rows.get("recompute all", {}).get("ours over it")
    if ratio is None:
        return Claim(text, "undecided", "not measured side by side")
    low, value, high = ratio
    limit = 1 - BEATEN
    right = True if high <= limit else False if low > limit else None
    return Claim(text, _verdict(right), f"{value:.3f} [{low:.3f}, {_end(high)}] times recompute all")


def _fills(where: str, found: Mapping[str, Any]) -> Claim:
    text = f"{where}: the plan fills at least 95 % of a binding budget and never exceeds it"
    search, ours = found.get("search", {}), found.get("rows", {}).get("ours", {})
    if "fill" not in ours:
        over = ours.get("state") in ("over", "out of memory")
        return Claim(
            text, "failed" if over else "undecided", ours.get("state") or search.get("message", "not measured")
        )
    detail = f"{ours['fill']:.1%} of the budget"
    if ours["fill"] > 1:
        return Claim(text, "failed", detail)
    if not search.get("binding"):
        return Claim(text, "undecided", f"{detail}; it does not bind")
    return Claim(text, _verdict(ours["fill"] >= FILL), f"{detail}. {'; '.join(search.get('notes', []))[:200]}")


def _end(high: float | None) -> str:
    return "…" if high is None or not math.isfinite(high) else f"{high:.3f}"
