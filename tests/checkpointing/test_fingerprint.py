from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.checkpointing import fingerprint as fingerprints
from autockpt.checkpointing.fingerprint import fingerprint, why_not

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
OTHERS = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2)
# a block of 64 KiB and a little more, of every width
SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 0, 2), (2, 3, 5), (64, 33), (70_001,), (3, 40_000), (130, 129, 2)])
dtypes = st.sampled_from(FLOATS + OTHERS)
few = settings(max_examples=60, deadline=None)


@pytest.fixture(scope="module", autouse=True, params=["as on a CPU", "many tables at a time, as on an accelerator"])
def _tables(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "many" in request.param:
            patch.setattr(fingerprints, "_ON_CPU", 64)
            patch.setattr(fingerprints, "_TABLES_ON_CPU", 16)
            patch.setattr(fingerprints, "_tables", {})
        yield


def of(tensor: Tensor) -> int:
    assert why_not(tensor) is None
    made = fingerprint(tensor)
    assert made.dtype == torch.int64 and made.dim() == 0 and not made.requires_grad
    return int(made)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all, NaN among them; of bools the two values that there are."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    width = torch.empty(0, dtype=dtype).element_size()
    whole = torch.randint(0, 256, (*shape, width), dtype=torch.uint8, generator=generator)
    return whole.view(dtype).reshape(shape)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@few
@given(SHAPES, dtypes, st.integers(0, 99))
def test_equal_bits_have_equal_fingerprints_wherever_they_lie(shape, dtype, seed) -> None:
    tensor = random(shape, dtype, seed)
    wanted = of(tensor)
    assert of(tensor.clone()) == wanted
    # the same in the middle of other memory, at an address that no wide word begins at
    room = random((tensor.numel() + 8,), dtype, seed + 1)
    moved = room[1 : 1 + tensor.numel()]
    moved.copy_(tensor.reshape(-1))
    assert of(moved.view(shape)) == wanted
    before = torch.get_rng_state()
    of(nn.Parameter(tensor) if tensor.is_floating_point() else tensor)
    assert torch.equal(torch.get_rng_state(), before)


@few
@given(SHAPES.filter(lambda s: 0 not in s), dtypes, st.integers(0, 99), st.data())
def test_a_single_bit_shows(shape, dtype, seed, data) -> None:
    tensor = random(shape, dtype, seed)
    wanted = of(tensor)
    if dtype == torch.bool:
        flat = tensor.view(-1)
        place = data.draw(st.integers(0, flat.numel() - 1))
        flat[place] = not flat[place]
    else:
        place = data.draw(st.integers(0, tensor.nbytes - 1))
        as_bytes(tensor)[place] ^= 1 << data.draw(st.integers(0, 7))
    assert of(tensor) != wanted


@few
@given(SHAPES.filter(lambda s: torch.Size(s).numel() > 1), dtypes, st.integers(0, 99), st.data())
def test_positions_show(shape, dtype, seed, data) -> None:
    tensor = random(shape, dtype, seed)
    flat, wanted = tensor.view(-1), of(tensor)
    n = flat.numel()
    kind = data.draw(st.sampled_from(["swap", "shift", "reverse", "permute", "rectangle"]))
    order = torch.arange(n)
    if kind == "swap":
        i, j = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
        order[i], order[j] = j, i
    elif kind == "shift":
        order = order.roll(data.draw(st.integers(1, n - 1)))
    elif kind == "reverse":
        order = order.flip(0)
    elif kind == "permute":
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    elif n >= 4:  # sums of rows and columns stay
        half = n // 2
        flat[0], flat[half + 1] = flat[half].clone(), flat[1].clone()
        wanted = of(tensor)
        order[0], order[1], order[half], order[half + 1] = 1, 0, half + 1, half
    # byte by byte: not every type can be indexed
    parts = as_bytes(tensor).view(n, -1)
    other = parts[order].reshape(-1).view(dtype).view(shape)
    same = torch.equal(as_bytes(other), as_bytes(tensor))
    assert (of(other) == wanted) == same


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_changed_signs_do_not_cancel(dtype: torch.dtype) -> None:
    """The top bit of a word as wide as the sum counts modulo two."""
    tensor = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {of(tensor), of(-tensor)}
    for other in range(1, 9):
        changed = tensor.clone()
        changed.view(-1)[[0, other]] *= -1
        seen.add(of(changed))
    assert len(seen) == 10


def test_views_are_read_where_they_are() -> None:
    base = torch.randn(6, 5, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    wanted = of(base)
    assert of(base.permute(2, 0, 1)) == of(base.permute(2, 0, 1).contiguous()) != wanted
    row = base[1:2].expand(6, 5, 4)
    assert of(row.contiguous()) == of(row)
    assert of(base[:, 1:3]) == of(base[:, 1:3].contiguous()) != of(base[:, 2:4])
    gaps = base.real.transpose(0, 2)
    assert of(gaps.contiguous()) == of(gaps)
    large = torch.randn(100, 3, 333)[:, 1:]
    assert of(large) == of(large.clone())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
def test_scattered_elements_are_read_as_words(dtype: torch.dtype) -> None:
    values = torch.arange(16).to(dtype)
    assert of(values[::2]) == of(values[::2].clone()) != of(values[1::2])


def test_only_plain_tensors_with_memory_have_one() -> None:
    values, given_back = torch.eye(3), torch.ones(3)
    given_back.untyped_storage().resize_(0)
    quantized = torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)
    for other in (values.to_sparse(), values.to("meta"), quantized, values.cfloat().conj(), given_back):
        assert why_not(other) is not None
    assert why_not(nn.Parameter(values)) is None


def test_modes_do_not_see_it_and_memory_is_constant() -> None:
    class Sees(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Sees.count += 1
            return func(*args, **(kwargs or {}))

    tensor = torch.randn(1 << 22)
    of(tensor)
    with Sees(), torch.autocast("cpu"):
        made = fingerprint(tensor)
    assert Sees.count == 0 and int(made) == of(tensor)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        fingerprint(tensor.view(64, -1).t())
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak < 1 << 20 < tensor.nbytes
