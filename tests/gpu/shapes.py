"""What is run: on a card of the H200's class, or in small on whatever there is, to exercise the script itself."""

from dataclasses import dataclass

Spec = dict[str, str | int | bool]


@dataclass(frozen=True)
class Task:
    """One search and the table around it. ``spec`` as ``WorkloadSpec`` takes it, budgets as the command line does."""

    spec: Spec
    budgets: tuple[str, ...]
    options: tuple[str, ...] = ()  # more for `autockpt search`
    trials: int = 12
    seconds: int = 75  # for each search
    rounds: int = 7
    compiled: tuple[float, ...] = ()
    losses: bool = False  # other projects' losses among the rows
    part: int = 5


@dataclass(frozen=True)
class Rates:
    """What the time model is settled by: MiB of tensors, sides of a product and its seconds, an optimizer's values."""

    sizes: tuple[int, ...] = (64, 128, 256, 512)
    product: tuple[int, int, int] = (16_384, 4096, 14_336)
    seconds: float = 30.0
    values: int = 1 << 30


@dataclass(frozen=True)
class Shapes:
    """All sizes of one run of the script."""

    device: str
    tests: tuple[str, ...]  # of the contract suite, as pytest's -k takes it; empty: all
    processes: int
    kernels: Spec
    bits: dict[str, Spec]
    searches: dict[str, tuple[Spec, tuple[str, ...]]]  # specs and budgets, by name
    host_rounds: int
    overlap: Spec
    stress: Spec
    stress_steps: int
    foresight: dict[str, Spec]
    foresight_rounds: int
    quick_calibration: bool
    rates: Rates
    tasks: dict[str, Task]


_LLAMA: Spec = {"model": "llama-1b", "dtype": "bf16", "packed": True}
_LLAMA_SMALL: Spec = {"model": "llama-small", "packed": True}
_GPT2: Spec = {"model": "gpt2", "packed": True}
_BERT: Spec = {"model": "bert-base", "dtype": "bf16", "batch_size": 32, "seq_len": 512}
_VIT: Spec = {"model": "vit-base", "dtype": "bf16", "batch_size": 128}
_MAIN = _LLAMA | {"batch_size": 5, "seq_len": 2048}
_LONG = _LLAMA | {"batch_size": 1, "seq_len": 32768}
_LORA = _LLAMA | {"model": "llama-8b", "lora": 16}
_CHUNKS = ("--allow-inexact",)

CARD = Shapes(
    device="cuda",
    tests=(),
    processes=14,
    kernels=_LLAMA | {"batch_size": 1, "seq_len": 2048},
    bits={
        "bf16 weights": _LLAMA_SMALL | {"dtype": "bf16", "batch_size": 4, "seq_len": 512},
        "bf16 weights, dropout": _GPT2 | {"dtype": "bf16", "batch_size": 2, "seq_len": 512},
        "autocast, dropout": _GPT2 | {"autocast": "bf16", "batch_size": 2, "seq_len": 512},
        "fp32": _LLAMA_SMALL | {"batch_size": 2, "seq_len": 256},
    },
    searches={
        "gpt2": (_GPT2 | {"dtype": "bf16", "batch_size": 8, "seq_len": 1024}, ("80%act", "60%act", "45%act")),
        "bert-base": (_BERT, ("70%act", "40%act")),
        "vit-base": (_VIT, ("70%act", "40%act")),
        "llama-1b": (_LLAMA | {"batch_size": 4, "seq_len": 1536}, ("28GB", "32GB")),
    },
    host_rounds=5,
    overlap=_LLAMA | {"batch_size": 8, "seq_len": 2048},
    stress=_LLAMA_SMALL | {"dtype": "bf16", "batch_size": 8, "seq_len": 512},
    stress_steps=90,
    foresight={
        "llama-1b": _LLAMA | {"batch_size": 2, "seq_len": 2048},
        "gpt2 (dropout)": _GPT2 | {"dtype": "bf16", "batch_size": 16, "seq_len": 1024},
        "bert-base (dropout, padded)": _BERT,
        "vit-base": _VIT,
    },
    foresight_rounds=7,
    quick_calibration=False,
    rates=Rates(),
    tasks={
        # 5 x 2048 tokens: by its ghost run save-everything takes 41 GB, and recomputing everything still 24 GB
        # allocated and 28 GB reserved, most of it logits: 24 GB can be had with softmax in chunks, which all searches
        # may use, 16 GB perhaps with head and loss in chunks only.
        "llama-1b": Task(_MAIN, ("32GB",)),
        "llama-1b chunked": Task(_MAIN, ("24GB", "16GB"), _CHUNKS),
        "llama-1b default shape": Task(
            _LLAMA | {"batch_size": 4, "seq_len": 1536}, ("24GB",), seconds=140, rounds=5, losses=True
        ),
        # Liger's kernels, loss included, for everybody: by its ghost run save-everything takes 28 GiB
        "llama-1b liger": Task(_LLAMA | {"batch_size": 8, "seq_len": 2048, "liger": True}, ("24GB",), rounds=5),
        "llama-8b lora": Task(_LORA | {"batch_size": 1, "seq_len": 2048}, ("24GB",), rounds=5),
        "llama-8b 4 bits lora": Task(
            _LORA | {"batch_size": 2, "seq_len": 4096, "load_in_4bit": True}, ("24GB",), rounds=5
        ),
        "gpt2": Task(_GPT2 | {"dtype": "bf16", "batch_size": 32, "seq_len": 1024}, ("50%act",), seconds=45),
        "vit-base": Task(_VIT | {"batch_size": 256}, ("50%act",), seconds=45),
        "llama-1b compiled": Task(_MAIN, ("32GB",), compiled=(1.0, 0.5), rounds=5, seconds=45),
        "long sequence": Task(_LONG, ("80GB",), trials=8, seconds=90, rounds=5, part=6),
        "long sequence chunked": Task(_LONG, ("32GB",), _CHUNKS, trials=8, seconds=90, rounds=5, part=6),
        "large batch": Task(
            _LLAMA | {"batch_size": 48, "seq_len": 512}, ("40GB",), _CHUNKS, trials=8, rounds=5, part=6
        ),
        "video": Task({"model": "tests.gpu.video:video"}, ("60%act",), trials=4, rounds=3, part=6),
    },
)

_TINY: Spec = {"model": "llama-tiny", "batch_size": 4, "seq_len": 64, "packed": True}

TINY = Shapes(
    device="cpu",
    tests=(
        *("hooks_on_units and sequential", "shared_and_skipped", "everywhere and cnn and save"),
        "two_steps and sequential and offload",
    ),
    processes=1,
    kernels=_TINY,
    bits={"fp32": _TINY | {"batch_size": 2}, "autocast": _TINY | {"batch_size": 2, "autocast": "bf16"}},
    searches={"llama-tiny": (_TINY, ("75%",))},
    host_rounds=3,
    overlap=_TINY,
    stress=_TINY,
    stress_steps=4,
    foresight={
        "llama-tiny": _TINY,
        "gpt2-tiny (dropout)": _TINY | {"model": "gpt2-tiny"},
        "bert-tiny (dropout, padded)": {"model": "bert-tiny", "batch_size": 4, "seq_len": 64},
        "vit-tiny": {"model": "vit-tiny", "batch_size": 8},
    },
    foresight_rounds=3,
    quick_calibration=True,
    rates=Rates(sizes=(1,), product=(64, 32, 32), seconds=0.5, values=1 << 12),
    tasks={
        "llama-1b": Task(_TINY, ("70%", "60%"), trials=2, seconds=20, rounds=3, losses=True),
        "llama-8b lora": Task(_TINY | {"lora": 2}, ("85%",), trials=2, seconds=20, rounds=3),
        "video": Task({"model": "tests.gpu.video:small_video"}, ("70%act",), trials=2, seconds=20, rounds=3, part=6),
        "long sequence": Task(_TINY | {"batch_size": 1, "seq_len": 128}, ("70%",), _CHUNKS, trials=2, rounds=3, part=6),
    },
)

SHAPES = {"card": CARD, "tiny": TINY}
