"""Options that several verbs share, and parsers of their values."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from autockpt.errors import UsageError
from autockpt.schema import WorkloadSpec
from autockpt.schema.yaml import read


def opt(usage: str, help: str, default: Any = None, **settings: Any) -> Any:
    """An option as typer declares it. ``--trials -n N``: its names, and what its value is called."""
    *names, last = usage.split()
    if last.startswith("-"):
        return typer.Option(default, *names, last, help=help, **settings)
    return typer.Option(default, *names, metavar=last, help=help, **settings)


def flag(usage: str, help: str, **settings: Any) -> Any:
    """An option without a value, off where it is not given."""
    return opt(usage, help, default=False, **settings)


def arg(name: str, help: str, default: Any = None) -> Any:
    """An argument, likewise; ``...`` in place of a default: it must be given."""
    return typer.Argument(default, metavar=name, help=help)


DEVICE = opt("--device NAME", "cpu, cuda, cuda:1, xpu, … Default: the best there is, of several that of LOCAL_RANK.")
RUNS_FOLDER = opt("--out -o DIR", "Folder for run directories.", default=Path("results"))
FRESH = flag(
    "--fresh", "Rename an earlier run of this search, and start over. Default: print its answer or continue it."
)


def _option(kind: Any, usage: str, help: str, **settings: Any) -> tuple[Any, Any]:
    return kind | None, opt(usage, help, show_default=False, **settings)


_text = functools.partial(_option, str)
_switch = functools.partial(_option, bool)
_number = functools.partial(_option, int, min=1)


JOB = opt(
    "--job FILE",
    "The training step as YAML (docs/job.md lists the keys). Options take precedence.",
    show_default=False,
)

# field of WorkloadSpec -> the type of its option, and the option; None means: not given
WORKLOAD_OPTIONS: dict[str, tuple[Any, Any]] = {
    "model": _text(
        "--model -m MODEL", "Hub id, directory, config.json, built-in shape (llama-8b), or package.module:factory."
    ),
    "batch_size": _number("--batch-size -b N", "Sequences per micro-batch. Default: the shape's."),
    "seq_len": _text(
        "--seq-len -s N|auto",
        "Tokens of the longest sequence; for a search also auto, the longest that fit. Default: the shape's.",
    ),
    "packed": _switch("--packed/--padded", "No padding, so no attention mask. Default: padded."),
    "dtype": _text("--dtype [fp32|bf16|fp16]", "Type of the weights. Default: the shape's."),
    "autocast": _text("--autocast [bf16|fp16]", "Compute in this type. Default: off."),
    "optimizer": _text(
        "--optimizer [adamw|adamw_fused|adamw8bit|adafactor|sgd|none]",
        "Optimizer. Default: adamw.",
    ),
    "accumulate": _number("--accumulate N", "Micro-batches per optimizer step. Default: 1."),
    "lora": _number("--lora RANK", "Train LoRA adapters of this rank only."),
    "load_in_4bit": _switch("--load-in-4bit/--no-load-in-4bit", "Base weights in NF4, quantised twice (bitsandbytes)."),
}


def takes_workload(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb ``--job`` and the workload options; it receives all that was given as one mapping, ``workload``."""
    own = inspect.signature(verb, eval_str=True).parameters

    @functools.wraps(verb)
    def run(*, job: Path | None, **options: Any) -> None:
        given = {name: options.pop(name) for name in WORKLOAD_OPTIONS}
        given = {name: value for name, value in given.items() if value is not None}
        verb(workload=(job_file(job) if job is not None else {}) | given, **options)

    kept = [p for name, p in own.items() if name != "workload"]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)
        for name, (kind, option) in {**WORKLOAD_OPTIONS, "job": (Path | None, JOB)}.items()
    ]
    keyword_only = [p for p in kept if p.kind is p.KEYWORD_ONLY]
    positional = [p for p in kept if p.kind is not p.KEYWORD_ONLY]
    # the verb's first option, then the workload, then the rest: the order of --help
    signature = inspect.Signature([*positional, *keyword_only[:1], *shared, *keyword_only[1:]])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return run


def job_file(path: Path) -> dict[str, Any]:
    """The settings in a job file: fields of WorkloadSpec. Raises UsageError with the line for what is none of them."""
    document = read(path)
    spec = document.validate(WorkloadSpec, model="")  # which may be named on the command line instead
    return {name: getattr(spec, name) for name in document.data}


def listed(text: str) -> tuple[str, ...]:
    """The entries of ``A,B``, without blanks and empty ones."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def duration(text: str | None) -> float | None:
    """Seconds from ``90``, ``90s``, ``10m`` or ``1.5h``. Raises UsageError for anything else."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smh]?)", text)
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"{text!r} is not a duration", remedy="Write seconds, or 90s, 10m, 1.5h.")
    return seconds
