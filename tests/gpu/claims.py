"""What is claimed of GPUs, held against what was measured: passed, failed or undecided. Numbers in, words out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

Verdict = Literal["passed", "failed", "undecided"]
PEAK, PEAK_MEDIAN, STEP, HIDDEN, FILL, AHEAD = 0.05, 0.02, 0.05, 0.95, 0.97, 0.92
MODELS, SEARCHES = 4, 20  # as many have to be measured before all of them are said to be right
NO_CHOICES = ("nothing attached", "torch.utils.checkpoint by hand")  # rows of the host's times to compare with
AHEAD_AT = ("5-llama-1b-default-shape", "5-llama-1b-chunked"), "24GB"
# Jobs and budgets that are claimed something of whether or not they have been run.
PROMISED = {"5-llama-1b-default-shape": "24GB", "6-long-sequence": "80GB", "6-large-batch": "40GB"}
Found = Mapping[str, Mapping[str, Any]]  # the data of each item that has any, by slug


class Claim(NamedTuple):
    """One claim; ``detail`` says by which numbers."""

    text: str
    verdict: Verdict
    detail: str


def judged(found: Found) -> list[Claim]:
    """All claims. What was not measured is undecided."""
    foresight = [data for slug, data in found.items() if slug.startswith("4-")]
    jobs = {slug: data for slug, data in found.items() if slug[0] in "56" and "budgets" in data}
    searches = {slug: data for slug, data in found.items() if slug.startswith("5-searches")}
    return [
        *_contract(found.get("1-contract", {})),
        *_bits(found.get("1-bits", {})),
        _attention(found.get("1-attention", {})),
        _released(found.get("1-released", {})),
        _host_cost(found.get("1-host-cost", {}), found.get("1-attention", {})),
        _stress(found.get("2-stress", {})),
        _host(found.get("2-host-budget", {})),
        _overlap(found.get("2-overlap", {})),
        *(_peak(what, foresight) for what in ("reserved", "allocated")),
        _step(foresight),
        _all_searches(jobs, searches),
        *_jobs(jobs),
    ]


def _verdict(right: bool | None) -> Verdict:
    return "undecided" if right is None else "passed" if right else "failed"


def _contract(data: Mapping[str, Any]) -> Iterator[Claim]:
    """By what the gradients of small models are compared under; a test that was lost decides nothing."""
    groups = data.get("by", {})
    for group in ("fp32", "autocast", "dropout"):
        text = f"gradients are bit-equal with plain training under every choice: contract suite, {group}"
        if group not in groups:
            yield Claim(text, "undecided", "not measured")
            continue
        good, bad = groups[group]["passed"], groups[group]["failed"]
        detail = f"{good} tests pass, {bad} fail; of all {data['tests']} {data['skipped']} skipped, {data['lost']} lost"
        yield Claim(text, "failed" if bad else _verdict(None if data["lost"] or not good else True), detail)


def _bits(data: Mapping[str, Any]) -> Iterator[Claim]:
    text = "gradients are bit-equal with plain training under every choice: real sizes"
    kinds: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for name, row in data.get("rows", {}).items():
        what, _, choice = name.partition(": ")
        kinds.setdefault(what, []).append((choice, row))
    if not kinds:
        yield Claim(text, "undecided", "not measured")
    for what, rows in kinds.items():
        compared = [(choice, row) for choice, row in rows if row["values"]]
        unequal = [choice for choice, row in compared if row["unequal"]]
        refused = [choice for choice, row in rows if not row["values"]]
        detail = f"{len(compared) - len(unequal)} of {len(compared)} choices"
        detail += f"; not: {', '.join(unequal)}" if unequal else ""
        detail += f"; refused: {', '.join(refused)}" if refused else ""
        if not all(row["repeats"] for _, row in rows):
            yield Claim(f"{text}, {what}", "undecided", f"{detail}; plain training does not repeat itself")
        else:
            yield Claim(f"{text}, {what}", _verdict(not unequal if compared else None), detail)


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
    # cuDNN's backward has kernels of its own that are counted: what is asked for is one forward more, or none
    more = twice["kernels"] - once["kernels"]
    right = more > 0 and more % data["layers"] == 0 and kept["kernels"] == once["kernels"]
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
    if not count:
        return Claim(text, "undecided", "not measured")
    return Claim(text, _verdict(worst <= PEAK), f"largest difference {worst:.2%} of the peak, over {count} readings")


def _host_cost(data: Mapping[str, Any], attention: Mapping[str, Any]) -> Claim:
    """Failed only where a choice surely takes longer on the host than a layer without choices on the device."""
    text = "no choice keeps the host longer than a layer of the job keeps the GPU"
    plain = attention.get("rows", {}).get("save everything", {}).get("device seconds")
    if not data or not plain:
        return Claim(text, "undecided", "host time or the time of kernels was not measured")
    busy = plain / attention["layers"] * 1e6
    ours = {name: row for name, row in data["rows"].items() if name not in NO_CHOICES}
    took = {name: (row["forward"] + row["backward"], row["noise"]) for name, row in ours.items()}
    slow = [name for name, (both, noise) in took.items() if both * (1 - noise) > busy]
    shown = [n for n in took if n in slow or n.startswith(("remake", "selective"))]
    detail = f"a layer: {busy:.0f} µs of kernels; host: " + ", ".join(
        f"{name} {took[name][0]:.0f} µs ± {took[name][1]:.0%}" for name in shown
    )
    sure = all(both * (1 + noise) <= busy for both, noise in took.values())
    return Claim(text, "failed" if slow else _verdict(True if sure else None), detail)


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
    if "half of it refused" not in data:
        return Claim(text, "undecided", "not measured")
    claimed = data["claimed under the budget"]  # None: refused, though the ghost run said that it would do
    right = (
        claimed is not None
        and claimed <= data["budget"]
        and data["half of it refused"]
        and data["growths in later steps"] == 0
        and data.get("growths in steps of other lengths", 0) <= 1  # one area for all
    )
    detail = f"{'more than' if claimed is None else f'{claimed} of'} {data['budget']} bytes, "
    detail += f"{data['growths in later steps']} growths after the first step"
    return Claim(text, _verdict(right), detail)


def _overlap(data: Mapping[str, Any]) -> Claim:
    """By the least and the most of several profiled steps."""
    text = f"offload hides at least {HIDDEN:.0%} of its copy time where the link's bandwidth allows"
    rows = {name: row["hidden"] for name, row in data.get("rows", {}).items() if row.get("link allows it")}
    shares = {name: each for name, each in rows.items() if each and None not in each}
    if not shares:
        return Claim(text, "undecided", "no plan whose copies fit beside its compute was profiled")
    detail = ", ".join(f"{name}: {min(each):.1%} to {max(each):.1%}" for name, each in shares.items())
    if any(max(each) < HIDDEN for each in shares.values()):
        return Claim(text, "failed", detail)
    return Claim(text, _verdict(True if min(map(min, shares.values())) >= HIDDEN else None), detail)


def _pairs(what: str, items: list[Mapping[str, Any]]) -> list[tuple[float, Mapping[str, Any]]]:
    """What was predicted, and the row that has what was measured."""
    rows = [row for data in items for row in data.get("rows", {}).values()]
    return [(row[f"{what}, predicted"], row) for row in rows if row.get(what) and row.get(f"{what}, predicted")]


def _peak(what: str, items: list[Mapping[str, Any]]) -> Claim:
    text = f"{what} peak: median error at most {PEAK_MEDIAN:.0%}, worst {PEAK:.0%}, over six plans on {MODELS} models"
    errors = sorted(abs(guess / row[what] - 1) for guess, row in _pairs(what, items))
    if not errors:
        return Claim(text, "undecided", "not measured")
    middle, worst = statistics.median(errors), errors[-1]
    detail = f"median {middle:.1%}, worst {worst:.1%} of {len(errors)} plans on {len(items)} models"
    if worst > PEAK:
        return Claim(text, "failed", detail)
    if len(items) < MODELS:
        return Claim(text, "undecided", detail)
    return Claim(text, _verdict(middle <= PEAK_MEDIAN), detail)


def _step(items: list[Mapping[str, Any]]) -> Claim:
    """A prediction is wrong where it is too far off for every time within the measured one's interval."""
    text = f"step time is predicted within {STEP:.0%}, over six plans on {MODELS} models"
    pairs = _pairs("step", items)
    if not pairs:
        return Claim(text, "undecided", "not measured")
    ends = [(guess, *row["step between"]) for guess, row in pairs]
    wrong = sum(guess < (1 - STEP) * low or guess > (1 + STEP) * high for guess, low, high in ends)
    sure = sum((1 - STEP) * high <= guess <= (1 + STEP) * low for guess, low, high in ends)
    errors = sorted(abs(guess / row["step"] - 1) for guess, row in pairs)
    detail = f"{sure} of {len(pairs)} plans surely are, {wrong} surely are not; "
    detail += f"median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}"
    right = sure == len(pairs) and len(items) >= MODELS
    return Claim(text, "failed" if wrong else _verdict(True if right else None), detail)


def _all_searches(jobs: Found, more: Found) -> Claim:
    """Each plan as it was measured by another process than its search, under the budget as a real limit."""
    text = f"of {SEARCHES} searches no plan is over its budget, and binding budgets are filled to {FILL:.0%}"
    fills: dict[str, tuple[float, bool]] = {}
    over = []
    for slug, data in jobs.items():
        for budget, found in data["budgets"].items():
            ours, binding = found.get("rows", {}).get("ours", {}), bool(found["search"].get("binding"))
            if ours.get("state") in ("over", "out of memory"):
                over.append(f"{slug[2:]} at {budget}")
            elif "fill" in ours:
                fills[f"{slug[2:]} at {budget}"] = ours["fill"], binding
    for slug, data in more.items():
        for budget, row in data.get("rows", {}).items():
            if row.get("state") == "out of memory":
                over.append(f"{slug[2:]} at {budget}")
            elif "fill" in row:
                fills[f"{slug[2:]} at {budget}"] = row["fill"], bool(row["binding"])
    over += [name for name, (fill, _) in fills.items() if fill > 1]
    empty = [f"{name} {fill:.1%}" for name, (fill, binding) in fills.items() if binding and fill < FILL]
    count, binding = len(fills.keys() | set(over)), sum(b for _, b in fills.values())
    detail = f"{count} searches with a plan, {binding} of them binding"
    detail += f"; over: {', '.join(over)}" if over else ""
    detail += f"; not filled: {', '.join(empty)}" if empty else ""
    if over or empty:
        return Claim(text, "failed", detail)
    return Claim(text, _verdict(True if count >= SEARCHES else None), detail)


def _jobs(items: Found) -> Iterator[Claim]:
    open_yet = {slug: {"budgets": {budget: {}}} for slug, budget in PROMISED.items() if slug not in items}
    for slug, data in {**items, **open_yet}.items():
        for budget, found in data.get("budgets", {}).items():
            rows = found.get("rows", {})
            yield _fastest(f"{slug[2:]} at {budget}", rows)
            yield _fills(f"{slug[2:]} at {budget}", found)
            if slug in AHEAD_AT[0] and budget == AHEAD_AT[1]:
                yield _ahead(f"{slug[2:]} at {budget}", rows)


def _fastest(where: str, rows: Mapping[str, Any]) -> Claim:
    """Passed by the medians of interleaved steps; failed only where somebody is surely faster."""
    text = f"{where}: ours is the fastest of the rows that fit"
    if rows.get("ours", {}).get("state") == "failed":
        return Claim(text, "failed", f"ours does not run: {rows['ours'].get('message', '')}")
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


def _ahead(where: str, rows: Mapping[str, Any]) -> Claim:
    """Against every method that fits but our own other plans; recompute-all is one of them."""
    text = f"{where}: our step takes at most {AHEAD} times that of the fastest other method that fits"
    others = {
        name: row["ours over it"] for name, row in rows.items() if "ours over it" in row and not name.startswith("our ")
    }
    if not others:
        return Claim(text, "undecided", "not measured side by side")
    name = max(others, key=lambda n: others[n][1])
    low, value, high = others[name]
    detail = f"{value:.3f} [{low:.3f}, {_end(high)}] times {name}, of {len(others)} methods that fit"
    if any(low > AHEAD for low, _, _ in others.values()):
        return Claim(text, "failed", detail)
    return Claim(text, _verdict(True if all(high <= AHEAD for _, _, high in others.values()) else None), detail)


def _fills(where: str, found: Mapping[str, Any]) -> Claim:
    text = f"{where}: the plan fills at least {FILL:.0%} of a binding budget and never exceeds it"
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
