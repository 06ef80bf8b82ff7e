"""Host memory as control groups of either version narrow it, read from made-up system files."""

from pathlib import Path

import pytest

from autockpt.devices.cpu import CpuDevice

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.fixture
def system(tmp_path: Path):
    """Writes files below a made-up root and reads memory from there: 8 GiB in all, 6 GiB available, 1 GiB own."""

    def make(files: dict[str, str]) -> CpuDevice:
        basis = {
            "proc/meminfo": f"MemTotal: {8 * GIB // KIB} kB\nMemAvailable: {6 * GIB // KIB} kB\nHugePages_Total: 0\n",
            "proc/self/status": f"Name: python\nVmRSS: {3 * GIB // KIB} kB\nRssAnon: {GIB // KIB} kB\n",
        }
        for name, text in (basis | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return CpuDevice(proc=tmp_path / "proc", cgroup=tmp_path / "cgroup")

    return make


def test_without_control_groups_physical_memory_counts(system):
    memory = system({})
    assert (memory.capacity(), memory.free(), memory.own(), memory.used_by_others()) == (8 * GIB, 6 * GIB, GIB, GIB)
    memory = system({"proc/self/cgroup": "0::/a\n", "cgroup/a/memory.max": f"{64 * GIB}\n"})  # a limit above it
    assert (memory.capacity(), memory.free()) == (8 * GIB, 6 * GIB)
    memory = system({"proc/self/cgroup": "0::/docker/abc\n", "cgroup/memory.max": f"{3 * GIB}\n"})  # in a container
    assert memory.capacity() == 3 * GIB


def test_version_2_limit_of_an_ancestor_holds(system):
    memory = system(
        {
            "proc/self/cgroup": "0::/job/step\n",
            "cgroup/job/memory.max": f"{2 * GIB}\n",
            "cgroup/job/memory.current": f"{GIB + 300 * MIB}\n",
            "cgroup/job/memory.stat": f"anon 1\ninactive_file {100 * MIB}\n",
            "cgroup/job/step/memory.max": "max\n",
            "cgroup/job/step/memory.current": "1000\n",
        }
    )
    assert memory.capacity() == 2 * GIB
    assert memory.free() == 2 * GIB - GIB - 200 * MIB
    assert memory.used_by_others() == 200 * MIB


def test_version_1_limit_and_its_way_of_writing_none(system):
    unlimited = 9223372036854771712
    lines = "5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n"
    files = {
        "proc/self/cgroup": lines,
        "cgroup/memory/memory.limit_in_bytes": f"{unlimited}\n",
        "cgroup/memory/memory.usage_in_bytes": f"{7 * GIB}\n",
        "cgroup/memory/box/memory.limit_in_bytes": f"{4 * GIB}\n",
        "cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
    }
    memory = system(files)
    assert (memory.capacity(), memory.free(), memory.used_by_others()) == (4 * GIB, 3 * GIB, 0)
    assert system(files | {"cgroup/memory/box/memory.limit_in_bytes": str(unlimited)}).capacity() == 8 * GIB
