import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.standin import build

Inside = Callable[..., None]


@pytest.fixture(scope="session")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Inside:
    """Run tests in a process that has the stand-in: ``inside("tests/policies/test_contract.py", schedule="lazy")``.

    The first that asks compiles it. Skips, with the reason, where that cannot be done.
    """
    try:
        build.folder()
    except build.CannotBuild as error:
        pytest.skip(f"no stand-in: {error}")

    def run(*arguments: str, schedule: str = "random:0", timeout: float = 900, **more: str) -> None:
        report = tmp_path_factory.mktemp("standin") / "report"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", "-p", "tests.standin.plugin", *arguments],
            env=build.environment(schedule, report, AUTOCKPT_TEST_DEVICE="standin", **more),
            cwd=build.ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert re.search(r"^\d+ passed", done.stdout, re.M), done.stdout
        assert "opened the device" in report.read_text()

    return run
