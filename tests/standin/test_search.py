"""A whole search by the command line: its worker loads the device as any process does, by PyTorch's entry points."""

import json
import subprocess
import sys

import pytest
import yaml

from tests.standin import build

pytestmark = pytest.mark.campaign


def test_search_and_verify(inside, tmp_path):
    report = tmp_path / "report"
    environment = build.environment("random:3", report, AUTOCKPT_CACHE=str(tmp_path / "cache"))

    def run(*arguments: str, codes: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "autockpt", *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode in codes, done.stdout[-4000:] + done.stderr[-4000:]
        return done

    question = ["--model", "llama-tiny", "-b", "16", "-s", "128", "--choices", "save,recompute,offload"]
    command = ["search", "--budget", "75%", *question, "--device", "standin", "--trials", "2"]
    run(*command, "--plan-out", "plan.yaml")
    plan = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert plan["source"] == "measured" and plan["environment"]["device"]["kind"] == "standin"
    for row in plan["baselines"]:  # by the allocator's own rules
        assert row["predicted"]["peak_bytes"] == pytest.approx(row["measured"]["peak_bytes"], rel=0.1), row
    answer = json.loads(run("verify", "plan.yaml", "--device", "standin", "--json", codes=(0, 4)).stdout)
    states = {check["name"]: check["state"] for check in answer["checks"]}
    # what the machine's load makes of the step time is no promise of the device's
    assert {states.pop(name) for name in ("gradients", "sentinels", "peak")} == {"passed"}
    lines = report.read_text().splitlines()
    assert len(lines) >= 2 and all(line.endswith("opened the device") for line in lines), lines
