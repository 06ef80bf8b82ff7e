import pytest

from autockpt import errors
from autockpt.errors import AutockptError, UsageError, how_it_ended, without_passwords

CODES = {
    "UsageError": "usage",
    "PlanError": "plan",
    "WorkloadError": "workload",
    "RunDirectoryError": "run",
    "RanksError": "ranks",
    "InfeasibleError": "budget.infeasible",
    "ConflictError": "conflict",
    "RerunMismatch": "conflict.mismatch",
    "InPlaceError": "conflict.in_place",
    "TracingError": "tracing",
    "GhostError": "tracing.ghost",
    "MeasurementError": "measurement",
    "TimeLimitReached": "measurement.time_limit",
    "DeviceOutOfMemory": "memory.device",
    "HostBudgetExceeded": "memory.host",
}


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal SIGKILL"), (-40, "signal 40")]
)
def test_ends_of_processes_in_words(code: int, words: str) -> None:
    assert how_it_ended(code) == words


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://optuna:hunter2@host:5432/db", "postgresql://optuna:***@host:5432/db"),
        ("postgresql://me@server:hunter2@host/db", "postgresql://me@server:***@host/db"),
        ("postgresql://me:hunter2@hunter2/hunter2@host/db", "postgresql://me:***@host/db"),
        ("redis://:hunter2@host", "redis://:***@host"),
        ("mysql://host/db?user=me&password=hunter2&ssl=1", "mysql://host/db?user=me&password=***&ssl=1"),
        ("mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3Dhunter2", "mssql+pyodbc:///?odbc_connect=***"),
        *((url, url) for url in ("sqlite:///study.db", "sqlite:////tmp/a:b@c.db?mode=ro", "postgresql://me@host/db")),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_passwords(url) == shown
    assert without_passwords(f"--storage={url} and more") == f"--storage={shown} and more"
    error = UsageError(f"{url} is wrong", remedy=f"Not {url}")
    assert "hunter2" not in f"{error} {error!r} {error.args}"


def test_a_password_that_was_taken_apart_is_not_repeated() -> None:
    url = "postgresql://me:hunter2@host%21@nowhere/db"
    said = without_passwords('no host "host%21@nowhere"; tried hunter2@host! on nowhere', url)
    assert said == 'no host "***@nowhere"; tried *** on nowhere'


def test_codes_are_what_scripts_know() -> None:
    classes = (v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, AutockptError))
    assert {cls.__name__: cls.code for cls in classes} == {"AutockptError": "error"} | CODES
