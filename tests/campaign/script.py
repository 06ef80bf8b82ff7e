"""One pair as a script that anybody can run."""

from __future__ import annotations

import inspect
import pprint

from autockpt.schema.choices import Choice, dump_choice
from tests.campaign import observed
from tests.campaign.program import Program, source
from tests.campaign.trial import Verdict

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
