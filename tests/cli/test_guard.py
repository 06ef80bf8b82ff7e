import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from autockpt.cli.guard import guarded
from autockpt.errors import InfeasibleError, MeasurementError, PlanError, UsageError
from tests.cli.test_history import make_run


def leave(error: BaseException, **options: object) -> int:
    @guarded
    def verb(**_: object) -> None:
        raise error

    with pytest.raises(typer.Exit) as caught:
        verb(**options)
    return caught.value.exit_code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("u", remedy="r"), 2),
        (PlanError("p", remedy="r"), 2),
        (InfeasibleError("i", remedy="r"), 3),
        (MeasurementError("m", remedy="r"), 4),
        (KeyboardInterrupt(), 130),
        (typer.Exit(7), 7),
    ],
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(error) == code
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err


FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no device here that is always full")


@pytest.mark.slow
@needs_full
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_answer_that_cannot_be_written_is_said_in_a_sentence(tmp_path: Path, options: list[str]) -> None:
    for run, code, said in (
        (str(make_run(tmp_path).path), 4, "could not be written: No space left"),
        ("/nowhere", 2, "/nowhere does not exist"),
    ):
        with FULL.open("w") as full:
            command = [sys.executable, "-m", "autockpt", "history", run, *options]
            ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert ended.returncode == code and said in ended.stderr
        assert "Traceback" not in ended.stderr and "bug" not in ended.stderr


def test_a_bug_is_called_one_and_leaves_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    assert leave(KeyError("x")) == 4
    said = capsys.readouterr().err
    (log,) = tmp_path.iterdir()
    assert "unexpected KeyError" in said and "bug" in said and str(log) in said and "Traceback" not in said
    assert "Traceback" in log.read_text() and "KeyError: 'x'" in log.read_text()


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "SIGTERM")]
)
@pytest.mark.parametrize("turned_into", [KeyboardInterrupt(), RecursionError("too deep"), typer.Exit(130)], ids=repr)
def test_an_interrupt_is_one_whatever_code_makes_of_it(
    number: signal.Signals, code: int, word: str, turned_into: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)

    @guarded
    def verb(**_: object) -> None:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise turned_into from None

    with pytest.raises(typer.Exit) as caught:
        verb()
    said = capsys.readouterr().err
    assert caught.value.exit_code == code and "bug" not in said and signal.getsignal(number) is before
    assert isinstance(turned_into, typer.Exit) or word in said


def test_help_that_nobody_reads_has_the_code_of_any_answer() -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-m", "autockpt", "--help"], stdout=pipe, stderr=subprocess.PIPE, text=True)
    os.close(pipe)
    assert ended.returncode == 141 and "Traceback" not in ended.stderr


@pytest.mark.parametrize("printer", ["print", "results().print"])
def test_a_reader_that_went_away_is_no_error(printer: str) -> None:
    code = (
        "from autockpt.cli.guard import guarded, results\n"
        "@guarded\n"
        "def verb(**_):\n"
        f"    say = {printer}\n"
        "    for i in range(20000): say('x' * 50)\n"
        "import typer\n"
        "try: verb()\n"
        "except typer.Exit as e: raise SystemExit(e.exit_code)\n"
    )
    command = f'{{ {sys.executable} -c "{code}"; echo $? >&2; }} | head -1'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=900)
    assert done.stdout == "x" * 50 + "\n" and done.stderr == "141\n", "as a shell counts a process that SIGPIPE ended"


def test_an_error_that_nobody_reads_leaves_its_own_code() -> None:
    code = (
        "import os, sys, typer\n"
        "from autockpt.cli.guard import guarded\n"
        "from autockpt.errors import UsageError\n"
        "@guarded\n"
        "def verb(**_): raise UsageError('u', remedy='r')\n"
        "sys.stdin.read()\n"
        "try: verb()\n"
        "except typer.Exit as e: os._exit(e.exit_code)\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stderr.close()
        process.stdin.close()
        assert process.wait(900) == 2


@pytest.mark.parametrize(("name", "said"), [("search", "continues"), ("calibrate", "again")])
def test_an_interrupt_promises_to_go_on_where_something_is_kept(name, said, capsys) -> None:
    def verb(**options: object) -> None:
        raise KeyboardInterrupt

    verb.__name__ = name
    with pytest.raises(typer.Exit):
        guarded(verb)()
    assert said in capsys.readouterr().err
