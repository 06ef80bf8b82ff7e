"""``autockpt explain --rules`` on screen: what people say, what is predicted, what was measured."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autockpt.reporting.explain_view import basis_mark, writable
from autockpt.reporting.style import bullets, plain_table
from autockpt.schema import format_binary, format_bytes, words
from autockpt.schema.explanation import Reading, Rule, Rules

WIDE = 108


def print_rules(said: Rules, console: Console) -> None:
    """Print the table of rules and what its numbers rest on."""
    console.print(Text.assemble((said.model, "bold"), f" on {said.device}: rules of thumb, and this model"))
    if facts := words.job(said.settings):
        console.print(Text(facts, style="dim"))
    saving = f"Saving everything peaks at {format_bytes(said.save_all_peak)}, "
    console.print(f"{saving}of which {format_binary(said.activation_bytes)} come and go (simulated).")
    console.print()
    console.print(_table(said, console))
    held = "holds: at least that memory saved, at most that time added, that factor ±5 %, an amount within what is said"
    console.print(Text(held, style="dim"))
    addresses = {rule.source: rule.address for rule in said.rules if rule.address}
    notes = [f"{source}: {address}" for source, address in addresses.items()]
    notes += [
        "common advice: said in many courses and guides, no page of which could be named.",
        f"Bytes are simulated by ghost runs, FLOPs counted in them; predicted seconds: {said.basis_note}.",
    ]
    if all(rule.measured is None for rule in said.rules):
        notes.append("Nothing was measured: --measure takes real steps on this device.")
    console.print(bullets((*notes, *said.notes)))


def _table(said: Rules, console: Console) -> Table:
    encoding = console.encoding
    wide = console.width >= WIDE
    table = plain_table("<rule", *(["<whose"] if wide else []), "<says", "<predicted", "<measured")
    for rule in said.rules:
        named = writable(rule.name, encoding)
        whose = [named, rule.source] if wide else [Text.assemble(named, (f"\n{rule.source}", "dim"))]
        table.add_row(
            *whose,
            _promise(rule, encoding),
            _reading(rule, rule.predicted, basis_mark(said.basis), rule.note or "—"),
            _reading(rule, rule.measured, "", "counted" if rule.factor else "not measured"),
        )
    return table


def _promise(rule: Rule, encoding: str) -> Text:
    """What a rule says, what that comes to for this model, and a word on it."""
    text = Text(writable(rule.says, encoding))
    if rule.amount is not None:
        low, high = (_amount(value, rule.unit) for value in rule.amount)
        here = f"{low} to {high}" if low != high else low
        text.append(f"\nhere {here if rule.amount[0] else f'at most {high}'}", "dim")
    if rule.note and rule.predicted is not None:
        text.append(writable(f"\n{rule.note}", encoding), "dim")
    return text


def _amount(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_binary(round(value))
    return f"{value:.3g} {'layers' if unit == 'layers' else '×'}"


def _reading(rule: Rule, reading: Reading | None, tilde: str, missing: str) -> Text:
    """What a reading has to say to a rule, and whether it keeps it."""
    if reading is None:
        return Text(missing, style="dim")
    parts = []
    if reading.factor is not None:
        parts.append(f"{reading.factor:.2f} forwards")
    if rule.amount is not None and reading.amount is not None:
        parts.append(_amount(reading.amount, rule.unit))
    saved = reading.peak_saved if rule.of == "peak" else reading.activations_saved
    if rule.memory is not None and saved is not None:
        parts.append(f"{words.share(saved)} less")
    if reading.time_added is not None and rule.factor is None:
        parts.append(f"{tilde}{words.share(reading.time_added, signed=True)} time")
    misses = rule.misses(reading)
    verdict = ("", "") if misses is None else (f"no: {', '.join(misses)}", "red") if misses else ("holds", "green")
    return Text.assemble(", ".join(parts), "\n", verdict)
