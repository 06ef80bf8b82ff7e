"""One pair as a script that anybody can run, and made smaller."""

from __future__ import annotations

import dataclasses
import inspect
import pprint
from collections.abc import Iterator

from autockpt.schema.choices import SAVE, Choice, dump_choice
from tests.campaign import observed
from tests.campaign.pool import in_child
from tests.campaign.program import Program, draw, source
from tests.campaign.trial import PLANS, Verdict, plan

_MAIN = '''
class Plain(Exception):
    """Not an error of autockpt's."""


def main():
    import autockpt
    from pathlib import Path

    text = Path(__file__).read_text().partition("# --- the program")[2].partition("# --- end")[0]
    plain, again, planned = [], [], []
    run(text, None, plain)
    run(text, None, again)
    assert plain == again, "plain training does not repeat itself"
    ended = "ended"
    try:
        run(text, lambda model: autockpt.apply(model, autockpt.Plan(choices=PLAN)), planned)
    except autockpt.AutockptError as error:
        ended = f"refused: {error}"
    different = [name for (name, a), (_, b) in zip(plain, planned) if a != b]
    print(ended, "| different:", different or "nothing", "|", len(plain), "and", len(planned), "entries")


if __name__ == "__main__":
    main()
'''


def shrunk(number: int, smaller: bool) -> tuple[Program, dict[str, Choice], Verdict]:
    """The pair of a number; ``smaller``: without what its verdict does not need."""
    program = draw(number // PLANS)
    verdict = _ends(number, program, None)
    if verdict.word in ("invalid", "unsteady"):
        return program, {}, verdict
    choices = plan(program, number)[1]
    going = smaller
    while going:
        going = False
        for candidate in _smaller(program):
            other = plan(candidate, number)[1] if candidate.layers != program.layers else choices
            if _alike(_ends(number, candidate, other), verdict):
                program, choices, going = candidate, other, True
                break
        for name in [n for n, c in choices.items() if c.kind != "save"] if not going else []:
            other = choices | {name: SAVE}
            if any(c.kind != "save" for c in other.values()) and _alike(_ends(number, program, other), verdict):
                choices, going = other, True
                break
    return program, choices, _ends(number, program, choices)


def _ends(number: int, program: Program, choices: dict[str, Choice] | None) -> Verdict:
    if choices is None:
        choices = plan(program, number)[1]
    return in_child(number, program, choices)


def _alike(one: Verdict, other: Verdict) -> bool:
    """Whether two pairs end in the same way: errors must be of the same kind."""
    kinds = {v.detail.partition(":")[0] if v.word in ("refused", "foreign") else "" for v in (one, other)}
    return one.word == other.word and len(kinds) == 1


def _smaller(program: Program) -> Iterator[Program]:
    for i in range(len(program.pieces)):
        yield dataclasses.replace(program, pieces=program.pieces[:i] + program.pieces[i + 1 :])
    for i, placed in enumerate(program.pieces):
        simple = dataclasses.replace(placed, place="block", late=0)
        if simple != placed:
            yield dataclasses.replace(program, pieces=(*program.pieces[:i], simple, *program.pieces[i + 1 :]))
    plain = Program()
    for name in ("loop", "carry", "calls", "loss", "dtype", "dropout", "keyword"):
        if getattr(program, name) != getattr(plain, name):
            yield dataclasses.replace(program, **{name: getattr(plain, name)})
    if program.steps > 1:
        yield dataclasses.replace(program, steps=program.steps - 1)


def written(program: Program, choices: dict[str, Choice], verdict: Verdict) -> str:
    """A script that needs autockpt alone."""
    chosen = {name: dump_choice(choice) for name, choice in choices.items()}
    parts = (
        f'"""Pair {verdict.number}: {verdict.word}. {"; ".join(verdict.families)}. {verdict.detail}"""',
        f"PLAN = {pprint.pformat(chosen, width=110)}",
        "# --- the program",
        source(program).rstrip(),
        "# --- end",
        inspect.getsource(observed).partition("\n\n")[2].replace("from __future__ import annotations\n", "").strip(),
        _MAIN.strip(),
    )
    return "\n\n\n".join(parts) + "\n"
